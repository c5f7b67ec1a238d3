"""A run that is continued on the same data, or on data that changed: refused for what changes a number."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import TinyRun, checkpoint_tensors, differing, tiny_picture


def other_picture(data: Path) -> None:
    tiny_picture(80, 48, 77).save(data / "0.png")


def other_caption(data: Path) -> None:
    (data / "0.txt").write_text("a blue square")


def one_less(data: Path) -> None:
    (data / "4.png").unlink()
    (data / "4.txt").unlink()


def other_order(data: Path) -> None:
    (data / "0.png").rename(data / "9.png")
    (data / "0.txt").rename(data / "9.txt")


def other_pairs(data: Path) -> None:
    """The captions of 0 and 1 differ."""
    for old, new in (("0", "kept"), ("1", "0"), ("kept", "1")):
        (data / f"{old}.txt").rename(data / f"{new}.txt")


@pytest.mark.parametrize("change", [other_picture, other_caption, one_less, other_order, other_pairs])
def test_changed_data_are_another_run(
    begun_run: TinyRun, caplog: pytest.LogCaptureFixture, change: Callable[[Path], None]
) -> None:
    change(begun_run.root / "data")
    assert begun_run.train() == 2
    (refused,) = [record.message for record in caplog.records if "different run" in record.message]
    assert "data.items was '5 items, " in refused
    assert "data.decoder" not in refused
    assert "resume.allow: [data]" in refused


def test_names_may_change_where_the_order_stays(begun_run: TinyRun, whole_run: TinyRun) -> None:
    data = begun_run.root / "data"
    for path in data.iterdir():
        path.rename(data / f"moved-{path.name}")
    moved = data.rename(begun_run.root / "elsewhere")
    assert begun_run.train(f"data.path={moved}") == 0
    tensors = checkpoint_tensors(whole_run.folder, 6)
    assert differing(tensors, checkpoint_tensors(begun_run.folder, 6)) == []
    for name in ("pytorch_lora_weights.safetensors", "README.md"):
        whole, resumed = (run.folder / "lora" / name for run in (whole_run, begun_run))
        assert whole.read_bytes() == resumed.read_bytes()


def test_another_schema_of_the_cache_encodes_again_and_the_run_goes_on_bit_for_bit(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tiny_run.root / "whole"
    settings = ("data.caption_dropout=0.3", "data.crop=random", "data.crops_per_item=2")
    assert tiny_run.train(*settings, f"output.dir={whole}") == 0
    assert tiny_run.train(*settings, "train.steps=3") == 0
    before = json.loads((tiny_run.folder / "contract.json").read_text())
    monkeypatch.setattr("diffsynth_lite.data.cache._SCHEMA", 2)
    caplog.clear()
    assert tiny_run.train(*settings) == 0
    assert "encoding 10 items that the cache does not hold" in caplog.text
    assert json.loads((tiny_run.folder / "contract.json").read_text()) == before
    assert differing(checkpoint_tensors(whole, 6), checkpoint_tensors(tiny_run.folder, 6)) == []


@pytest.mark.parametrize(
    ("constant", "key"),
    [
        ("diffsynth_lite.data.items.IMAGE_DECODER_ID", "data.decoder"),
        ("diffsynth_lite.data.items._TRANSFORM_ID", "data.decoder"),
    ],
)
def test_another_decoder_is_refused_by_its_name(
    begun_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    constant: str,
    key: str,
) -> None:
    monkeypatch.setattr(constant, "v9 other")
    assert begun_run.train() == 2
    assert f"{key} was 'v1 " in caplog.text
    assert "data.items" not in caplog.text
    assert begun_run.train("resume.allow=[data]") == 0


@pytest.mark.parametrize(
    ("method", "key"),
    [("media_encoder_id", "data.media_encoder"), ("prompt_encoder_id", "data.prompt_encoder")],
)
def test_another_encoder_is_refused_by_its_name(
    begun_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    key: str,
) -> None:
    monkeypatch.setattr(
        f"diffsynth_lite.pipelines.qwen_image.QwenImage.{method}", lambda *_: "qwen_image/other/9 a template"
    )
    assert begun_run.train() == 2
    assert f"{key} was 'qwen_image/" in caplog.text
    assert "is 'qwen_image/other/9 " in caplog.text
    assert "data.items" not in caplog.text
