"""Whole runs on clips from text and from first frames, with a tiny pipeline that makes both."""

from pathlib import Path

import pytest
from tiny_run import TinyRun, checkpoint_tensors, tiny_picture, write_config

from diffsynth_lite.data.video_writing import write_video
from diffsynth_lite.pipelines.ltx_video import tiny

SETTINGS = (
    *("model.family=ltx_video", "lora.dropout=0", "train.steps=2", "train.global_batch_size=2"),
    *("data.frame_counts=[9]", "validation.prompts=[a red circle]", "train.micro_batch_size=1"),
    "train.use_gradient_checkpointing_offload=true",
)


@pytest.fixture
def clips(tmp_path: Path) -> TinyRun:
    tiny().save_pretrained(tmp_path / "model")
    data = tmp_path / "clips"
    for place in range(2):
        frames = [tiny_picture(80, 48, 10 + place + frame) for frame in range(12)]
        write_video(data / f"{place}.mp4", frames, fps=25)
        (data / f"{place}.txt").write_text("a blue square")
    (tmp_path / "starts").mkdir()
    for place in range(2):
        tiny_picture(80, 48, 10 + place).save(tmp_path / "starts" / f"{place}.png")
    return TinyRun(root=tmp_path, config=write_config(tmp_path, tmp_path / "model", data), settings=SETTINGS)


def test_clips_are_trained_from_text_and_from_their_first_frames(clips: TinyRun) -> None:
    assert clips.train() == 0
    from_text = checkpoint_tensors(clips.folder, 2)
    assert len(list((clips.folder / "previews").rglob("*.mp4"))) > 0

    starts, framed = clips.root / "starts", clips.root / "framed"
    changes = (f"data.first_frame_dir={starts}", f"validation.inputs=[{starts / '0.png'}]")
    assert clips.train(*changes, f"output.dir={framed}") == 0
    from_frames = checkpoint_tensors(framed, 2)
    assert from_text.keys() == from_frames.keys()
    assert any(not from_text[name].equal(from_frames[name]) for name in from_text)
    assert {row["step"] for row in clips.metrics(framed) if "loss" in row} == {1, 2}
