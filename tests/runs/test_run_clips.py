"""Whole runs on clips of several lengths and shapes, and on pairs of images."""

import json
import shutil
from pathlib import Path

import av
import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from recorded_train import read_records, recorded_step
from tiny_run import (
    UNWATCHED,
    TinyRun,
    checkpoint_tensors,
    differing,
    garble_media,
    make_clip_run,
    tiny_image,
    write_config,
)

from diffsynth_lite.pipelines import qwen_image_edit, wan
from diffsynth_lite.pipelines.qwen_image_edit import QwenImageEdit
from diffsynth_lite.training import trainer


@pytest.fixture(scope="module")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_wan")
    wan.tiny().save_pretrained(folder)
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


def test_clips_and_images_are_learned_together(clip_run: TinyRun) -> None:
    for place in range(2):
        tiny_image(48, 32, 30 + place).save(clip_run.root / "clips" / f"{place}.png")
        (clip_run.root / "clips" / f"{place}.txt").write_text("a blue square")
    assert clip_run.train(*UNWATCHED, "train.steps=6") == 0
    losses = [row["loss"] for row in clip_run.metrics() if "loss" in row]
    assert len(losses) == 6
    assert json.loads((clip_run.folder / "contract.json").read_text())["data.items"].startswith("9 items")


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


PAIRS = ((80, 48), (48, 80), (80, 48), (64, 64))  # sizes of the inputs; the targets have others


@pytest.fixture(scope="module")
def tiny_edit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_edit")
    qwen_image_edit.tiny().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of 128 x 128 pixels instead of 1024 x 1024, which take a minute on a CPU."""
    dimensions = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(
        pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: dimensions(area / 64, ratio)
    )


@pytest.fixture
def edit_run(tmp_path: Path, tiny_edit: Path) -> TinyRun:
    """Targets in ``after``, with their inputs in ``before``, and a metadata file that names both."""
    rows = []
    for folder in ("after", "before"):
        (tmp_path / "pairs" / folder).mkdir(parents=True)
    for place, size in enumerate(PAIRS):
        before, after = f"before/{place}.png", f"after/{place}.png"
        tiny_image(*size, 10 + place).save(tmp_path / "pairs" / before)
        tiny_image(64, 32, 20 + place).save(tmp_path / "pairs" / after)
        rows.append({"file_name": after, "input": before, "text": "make it a circle" + " of red" * place})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "pairs" / "metadata.jsonl").write_text(lines)
    return TinyRun(
        root=tmp_path,
        config=write_config(tmp_path, tiny_edit, tmp_path / "pairs"),
        settings=(
            *("model.family=qwen_image_edit", "data.input_columns=[input]", "data.caption_dropout=0.5"),
            *("train.micro_batch_size=1", "train.global_batch_size=2", "train.steps=4"),
            *("validation.prompts=[a circle]", f"validation.inputs=[{tmp_path}/pairs/before/0.png]"),
            "validation.loss_items=2",
        ),
    )


def captions_from_metadata(pairs: Path) -> None:
    """Files of text in its place."""
    for line in (pairs / "metadata.jsonl").read_text().splitlines():
        row = json.loads(line)
        (pairs / row["file_name"]).with_suffix(".txt").write_text(row["text"])
    (pairs / "metadata.jsonl").unlink()


def test_pairs_in_two_folders_are_those_of_the_metadata(edit_run: TinyRun) -> None:
    short = ("train.steps=1", "validation.prompts=[]", "validation.inputs=[]")
    assert edit_run.train(*short) == 0
    pairs = edit_run.root / "pairs"
    captions_from_metadata(pairs)
    entries = sorted((edit_run.root / "cache").rglob("*.safetensors"))
    folders = (f"data.path={pairs / 'after'}", f"data.input_dirs=[{pairs / 'before'}]")
    garble_media(pairs)  # known from the first run, by their names
    other = f"output.dir={edit_run.root / 'other'}"
    assert edit_run.train(*short, *folders, "data.input_columns=[]", other) == 0
    assert sorted((edit_run.root / "cache").rglob("*.safetensors")) == entries


def test_held_out_pairs_have_inputs_of_their_own(edit_run: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    pairs, held_out = edit_run.root / "pairs", edit_run.root / "held_out"
    captions_from_metadata(pairs)
    shutil.copytree(pairs, held_out)
    short = ("train.steps=1", "validation.prompts=[]", "validation.inputs=[]", "data.input_columns=[]")
    targets = f"data.path={pairs / 'after'}"
    inputs = f"data.input_dirs=[{pairs / 'before'}]"
    assert edit_run.train(*short, targets, inputs, f"validation.data={held_out / 'after'}") == 2
    assert "before belongs to the training items" in caplog.text

    (pairs / "before").rename(pairs / "after" / "before")
    (held_out / "before").rename(held_out / "after" / "before")
    inputs = f"data.input_dirs=[{pairs / 'after' / 'before'}]"
    garble_media(pairs / "after" / "before")
    assert edit_run.train(*short, targets, inputs, f"validation.data={held_out / 'after'}") == 2
    assert "pairs/after/before/0.png: not a PNG" in caplog.text
    assert "held_out/after/before/0.png" not in caplog.text
    shutil.copytree(held_out, pairs, dirs_exist_ok=True)
    assert edit_run.train(*short, targets, inputs, f"validation.data={held_out / 'after'}") == 0


@pytest.mark.parametrize(
    ("setting", "last_size"),
    [
        ("train.micro_batch_size=2", 2),
        # Tokens of 16 x 16 pixels: 8 of a target with 60 or 64 of its input.
        ("train.micro_batch_tokens=136", 1),
    ],
)
def test_inputs_of_several_shapes_train_in_batches_of_one_shape_each(
    edit_run: TinyRun, monkeypatch: pytest.MonkeyPatch, setting: str, last_size: int
) -> None:
    monkeypatch.setattr(trainer, "train_step", recorded_step(edit_run.root / "records"))
    assert (
        edit_run.train(
            setting,
            "train.steps=6",
            "validation.loss_items=4",
            "validation.prompts=[]",
            "validation.inputs=[]",
        )
        == 0
    )
    rows = read_records(edit_run.root / "records")
    assert {(row["bucket"], row["forward_samples"]) for row in rows} == {
        ("64x32 from 160x96", 2),
        ("64x32 from 96x160", 2),
        ("64x32 from 128x128", last_size),
    }


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            "data.input_columns=[]",
            "4 of kind image, such as after/0.png; this family trains on the kinds edit",
        ),
        ("validation.inputs=[]", "validation.inputs: is empty; previews of this family start from images"),
        ("data.input_columns=[inptu]", "has no column inptu; it has file_name, input, text"),
    ],
)
def test_data_that_are_no_pairs_are_refused_in_one_line_before_weights_are_loaded(
    edit_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: str,
    message: str,
) -> None:
    def loaded(*_args: object) -> None:
        pytest.fail("weights were loaded")

    for method in ("load_transformer", "load_prompt_encoder", "load_media_encoder"):
        monkeypatch.setattr(QwenImageEdit, method, loaded)
    assert edit_run.train(spoil) == 2
    [error] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert message in error
    assert "\n" not in error
