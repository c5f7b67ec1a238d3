"""Whole runs on pairs of pictures, with a tiny pipeline that edits."""

import json
import shutil
from pathlib import Path

import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from recorded_train import read_records, recorded_step
from tiny_run import TinyRun, garble_media, tiny_picture, write_config

from diffsynth_lite.pipelines.qwen_image_edit import QwenImageEdit, tiny
from diffsynth_lite.training import trainer

PAIRS = ((80, 48), (48, 80), (80, 48), (64, 64))  # sizes of the inputs; the targets have others


@pytest.fixture(scope="module")
def tiny_edit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_edit")
    tiny().save_pretrained(folder)
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
        tiny_picture(*size, 10 + place).save(tmp_path / "pairs" / before)
        tiny_picture(64, 32, 20 + place).save(tmp_path / "pairs" / after)
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


def test_pairs_in_two_folders_are_those_of_the_metadata(edit_run: TinyRun) -> None:
    short = ("train.steps=1", "validation.prompts=[]", "validation.inputs=[]")
    assert edit_run.train(*short) == 0
    pairs = edit_run.root / "pairs"
    for line in (pairs / "metadata.jsonl").read_text().splitlines():
        row = json.loads(line)
        (pairs / row["file_name"]).with_suffix(".txt").write_text(row["text"])
    (pairs / "metadata.jsonl").unlink()
    entries = sorted((edit_run.root / "cache").rglob("*.safetensors"))
    folders = (f"data.path={pairs / 'after'}", f"data.input_dirs=[{pairs / 'before'}]")
    garble_media(pairs)  # known from the first run, by their names
    other = f"output.dir={edit_run.root / 'other'}"
    assert edit_run.train(*short, *folders, "data.input_columns=[]", other) == 0
    assert sorted((edit_run.root / "cache").rglob("*.safetensors")) == entries


def test_held_out_pairs_have_inputs_of_their_own(edit_run: TinyRun, caplog: pytest.LogCaptureFixture) -> None:
    pairs, held_out = edit_run.root / "pairs", edit_run.root / "apart"
    for line in (pairs / "metadata.jsonl").read_text().splitlines():
        row = json.loads(line)
        (pairs / row["file_name"]).with_suffix(".txt").write_text(row["text"])
    (pairs / "metadata.jsonl").unlink()
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
    assert "apart/after/before/0.png" not in caplog.text
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


def test_more_inputs_than_the_pipeline_takes_are_bad_items_that_are_named_before_an_encoder_loads(
    edit_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pairs = edit_run.root / "pairs"
    rows = [json.loads(line) for line in (pairs / "metadata.jsonl").read_text().splitlines()]
    rows[2]["input"] = ["before/1.png", "before/2.png"]
    (pairs / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(QwenImageEdit, "load_media_encoder", lambda *_: pytest.fail("an encoder was loaded"))
    assert edit_run.train() == 2
    assert "after/2.png: has 2 input images, and this family takes 1" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            "data.input_columns=[]",
            "4 of kind image, such as after/0.png; this family trains on the kinds edit",
        ),
        ("validation.inputs=[]", "validation.inputs: is empty; previews of this family start from pictures"),
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
