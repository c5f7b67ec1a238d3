"""Whole runs on pictures of several shapes: with the cache and without it, in one process and in two."""

import pytest
from PIL import Image
from recorded_train import read_records, recorded_step
from tiny_run import TinyRun, checkpoint_tensors, differing, forked, tiny_picture

from diffsynth_lite.training import trainer

SETTINGS = (
    *("data.width=null", "data.height=null", "data.resolutions=[32,48]", "data.crop=random"),
    *("data.caption_dropout=0.2", "lora.dropout=0", "train.steps=4"),
)


def add_upright_pictures(run: TinyRun) -> None:
    for place in range(3):
        picture = Image.effect_mandelbrot((48, 80 + place), (-2, -1, 1, 1), 30 + place).convert("RGB")
        picture.save(run.root / "data" / f"upright {place}.png")
        (run.root / "data" / f"upright {place}.txt").write_text("a blue square")


def test_a_token_budget_puts_more_of_the_small_ones_into_a_forward(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("data.width=null", "data.height=null", "data.sizes=[64x32, 32x32]")
    for place in range(4):
        tiny_picture(40, 36, 30 + place).save(tiny_run.root / "data" / f"small {place}.png")
        (tiny_run.root / "data" / f"small {place}.txt").write_text("a blue square")
    budget = (*sizes, "train.micro_batch_tokens=8", "lora.dropout=0")  # of 16 x 16 pixels
    monkeypatch.setattr(trainer, "train_step", recorded_step(tiny_run.root / "records"))
    parts = f"output.dir={tiny_run.root / 'parts'}"
    assert tiny_run.train(*budget) == 0
    whole = read_records(tiny_run.root / "records")
    assert {(row["bucket"], row["forward_samples"]) for row in whole} == {("64x32", 1), ("32x32", 2)}
    assert [row["position"] for row in whole] == list(range(len(whole)))
    for step in range(6):
        of_step = [row for row in whole if row["step"] == step]
        assert {row["step_samples"] for row in of_step} == {len(of_step)}

    assert tiny_run.train(*budget, parts, "train.steps=2") == 0
    assert tiny_run.train(*budget, parts) == 0
    assert (
        differing(checkpoint_tensors(tiny_run.folder, 6), checkpoint_tensors(tiny_run.root / "parts", 6))
        == []
    )


def test_the_micro_batch_may_change_where_there_is_one_bucket_and_not_where_there_are_several(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ("lora.dropout=0", "train.steps=4")
    assert tiny_run.train(*settings, "train.steps=2") == 0
    assert tiny_run.train(*settings, "train.micro_batch_size=4") == 0

    add_upright_pictures(tiny_run)
    several = (*settings, "data.width=null", "data.height=null", "data.resolutions=[48]")
    several = (*several, f"output.dir={tiny_run.root / 'several'}")
    assert tiny_run.train(*several, "train.steps=2") == 0
    assert tiny_run.train(*several, "train.micro_batch_size=4") == 2
    assert "train.micro_batch_size was 2, is 4" in caplog.text
    assert tiny_run.train(*several) == 0


def test_mixed_shapes_train_the_same_with_and_without_cache_and_in_two_processes(tiny_run: TinyRun) -> None:
    add_upright_pictures(tiny_run)
    assert tiny_run.train(*SETTINGS) == 0
    cached = checkpoint_tensors(tiny_run.folder, 4)

    live = tiny_run.root / "live"
    empty = tiny_run.root / "empty"
    changes = ("data.cache=false", f"data.cache_dir={empty}", f"output.dir={live}")
    assert tiny_run.train(*SETTINGS, *changes) == 0
    assert differing(checkpoint_tensors(live, 4), cached) == []
    assert not list(empty.rglob("*.safetensors"))

    two, shared = tiny_run.root / "two", tiny_run.root / "shared"
    settings = (*SETTINGS, f"data.cache_dir={shared}", f"output.dir={two}", "train.micro_batch_size=1")
    program = forked(tiny_run, *settings, num_processes=2)
    assert program.wait() == 0, program.printed()
    names = sorted(path.name for path in (tiny_run.root / "cache").rglob("*.safetensors"))
    assert sorted(path.name for path in shared.rglob("*.safetensors")) == names
    ours = {path.name: path.read_bytes() for path in shared.rglob("*.safetensors")}
    assert ours == {path.name: path.read_bytes() for path in (tiny_run.root / "cache").rglob("*.safetensors")}
