"""Whole runs on clips of several lengths and shapes, with a tiny pipeline that makes clips."""

import json
import shutil
from pathlib import Path

import av
import pytest
from PIL import Image
from tiny_run import (
    UNWATCHED,
    TinyRun,
    checkpoint_tensors,
    differing,
    garble_media,
    make_clip_run,
    tiny_picture,
)

from diffsynth_lite.pipelines.wan import tiny


@pytest.fixture(scope="module")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_wan")
    tiny().save_pretrained(folder)
    return folder


@pytest.fixture
def clip_run(tmp_path: Path, tiny_wan: Path) -> TinyRun:
    return make_clip_run(tmp_path, tiny_wan)


def test_a_run_on_clips_offloads_their_blocks_and_shows_previews_that_play(clip_run: TinyRun) -> None:
    assert clip_run.train() == 0
    report = next(row for row in clip_run.metrics() if "blocks_recomputed" in row)
    assert report["blocks_recomputed"] == 2 * 2  # two blocks, two micro-batches
    assert report["bytes_offloaded"] > 0
    previews = clip_run.folder / "previews"
    clips = sorted(previews.glob("*.mp4"))
    assert [path.name[:23] for path in clips] == [
        f"step-{step:08d}-prompt-{place:02d}" for step in (0, 4) for place in (0, 1)
    ]
    for path in clips:
        with av.open(str(path)) as clip:
            sizes = [(frame.width, frame.height) for frame in clip.decode(video=0)]
        assert sizes == [(32, 32)] * 9
        with Image.open(path.with_suffix(".png")) as strip:
            strip.load()
            assert strip.width > 2 * strip.height
    with Image.open(previews / "grid.png") as grid:
        grid.load()


def test_a_resumed_run_on_clips_is_the_same_run_bit_for_bit(clip_run: TinyRun) -> None:
    whole, parts = clip_run.root / "whole", clip_run.root / "parts"
    settings = ("data.clip=uniform", "data.clips_per_video=2", "data.crop=random", "data.caption_dropout=0.3")
    assert clip_run.train(f"output.dir={whole}", *settings) == 0
    assert clip_run.train(f"output.dir={parts}", *settings, *UNWATCHED, "train.steps=2") == 0
    assert (
        clip_run.train(
            f"output.dir={parts}", *settings, *UNWATCHED, "--no-use_gradient_checkpointing_offload"
        )
        == 0
    )
    assert differing(checkpoint_tensors(whole, 4), checkpoint_tensors(parts, 4)) == []


def test_clips_and_pictures_are_learned_together(clip_run: TinyRun) -> None:
    for place in range(2):
        tiny_picture(48, 32, 30 + place).save(clip_run.root / "clips" / f"{place}.png")
        (clip_run.root / "clips" / f"{place}.txt").write_text("a blue square")
    assert clip_run.train(*UNWATCHED, "train.steps=6") == 0
    losses = [row["loss"] for row in clip_run.metrics() if "loss" in row]
    assert len(losses) == 6
    assert json.loads((clip_run.folder / "contract.json").read_text())["data.items"].startswith("9 items")


def test_a_second_start_on_cached_clips_reads_none_of_them(clip_run: TinyRun) -> None:
    short = ("train.steps=2", *UNWATCHED)
    assert clip_run.train(*short) == 0
    garble_media(clip_run.root / "clips")
    again = clip_run.root / "again"
    assert clip_run.train(*short, f"output.dir={again}") == 0
    assert differing(checkpoint_tensors(clip_run.folder, 2), checkpoint_tensors(again, 2)) == []


def test_a_damaged_clip_is_left_out_and_listed_when_asked_to(
    clip_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = clip_run.root / "clips" / "short.mp4"
    damaged.write_bytes(damaged.read_bytes()[:-300])
    assert clip_run.train("train.steps=2", *UNWATCHED) == 2
    assert "short.mp4" in caplog.text
    held_out = shutil.copytree(clip_run.root / "clips", clip_run.root / "held_out")
    skip = ("data.on_bad_item=skip", "data.max_bad_ratio=0.5", f"validation.data={held_out}")
    assert clip_run.train("train.steps=2", "validation.prompts=[]", *skip) == 0
    rows = [json.loads(line) for line in (clip_run.folder / "quarantine.jsonl").read_text().splitlines()]
    assert {row["item"] for row in rows} == {"short.mp4"}
    assert [row["step"] for row in clip_run.metrics() if "validation_loss" in row] == [0, 2]
