"""What a run trains on: the same samples with cache and without, in workers and processes; bad items."""

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from recorded_train import read_records, recorded_step
from tiny_run import LOG_LINE, TinyRun, checkpoint_tensors, differing, forked, make_mixed_run, tiny_image

from diffsynth_lite.data.records import Record
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training import run, stages, trainer

SETTINGS = (
    *("data.width=null", "data.height=null", "data.resolutions=[32,48]", "data.crop=random"),
    *("data.caption_dropout=0.2", "lora.dropout=0", "train.steps=4"),
)


def add_upright_images(run: TinyRun) -> None:
    for place in range(3):
        image = Image.effect_mandelbrot((48, 80 + place), (-2, -1, 1, 1), 30 + place).convert("RGB")
        image.save(run.root / "data" / f"upright {place}.png")
        (run.root / "data" / f"upright {place}.txt").write_text("a blue square")


def test_a_token_budget_puts_more_of_the_small_ones_into_a_forward(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ("data.width=null", "data.height=null", "data.sizes=[64x32, 32x32]")
    for place in range(4):
        tiny_image(40, 36, 30 + place).save(tiny_run.root / "data" / f"small {place}.png")
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

    add_upright_images(tiny_run)
    several = (*settings, "data.width=null", "data.height=null", "data.resolutions=[48]")
    several = (*several, f"output.dir={tiny_run.root / 'several'}")
    assert tiny_run.train(*several, "train.steps=2") == 0
    assert tiny_run.train(*several, "train.micro_batch_size=4") == 2
    assert "train.micro_batch_size was 2, is 4" in caplog.text
    assert tiny_run.train(*several) == 0


def test_mixed_shapes_train_the_same_with_and_without_cache_and_in_two_processes(tiny_run: TinyRun) -> None:
    add_upright_images(tiny_run)
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


SCRIPT = Path(__file__).with_name("recorded_train.py")


@pytest.fixture
def mixed_run(tmp_path: Path, tiny_model: Path) -> TinyRun:
    """Images of many shapes in three sources, one of them with masks."""
    run = make_mixed_run(tmp_path, tiny_model)
    steps = ("train.steps=10", "output.checkpoint_every_steps=10")
    return replace(run, settings=(*run.settings, *steps, "lora.dropout=0"))


def samples(run: TinyRun, name: str, *settings: str) -> list[dict[str, Any]]:
    """All samples of a run in this process."""
    folder = run.root / "records" / name
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer, "train_step", recorded_step(folder))
        assert run.train(*settings, f"output.dir={run.root / name}") == 0
    return read_records(folder)


@pytest.mark.slow
def test_workers_processes_and_a_resume_change_no_sample_of_any_step(mixed_run: TinyRun) -> None:
    alone = samples(mixed_run, "alone")
    assert [row["position"] for row in alone] == list(range(40))
    assert [row["step"] for row in alone] == [position // 4 for position in range(40)]
    assert len({row["bucket"] for row in alone}) > 3
    assert any("loss_mask" in row["tensors"] for row in alone)

    samples(mixed_run, "parts", "train.steps=4")
    records = mixed_run.root / "records" / "parts"
    # tests/data proves that several workers of one process give what one does.
    settings = ("data.num_workers=1", f"output.dir={mixed_run.root / 'parts'}")
    program = forked(mixed_run, *settings, script=(SCRIPT, records), num_processes=2)
    assert program.wait() == 0, program.printed()
    assert [line for line in program.printed().splitlines() if not LOG_LINE.match(line)] == []
    assert read_records(records) == alone


HALF_BLIND = Path(__file__).with_name("half_blind_train.py")


def quarantined(tiny_run: TinyRun) -> list[str]:
    rows = (tiny_run.folder / "quarantine.jsonl").read_text().splitlines()
    return [json.loads(row)["item"] for row in rows]


def test_what_one_process_cannot_read_is_bad_for_all_and_headers_are_read_by_the_main_one(
    tiny_run: TinyRun,
) -> None:
    notes = tiny_run.root / "notes"
    settings = ("train.micro_batch_size=1", "train.steps=2")

    program = forked(tiny_run, *settings, script=(HALF_BLIND, notes), num_processes=2)
    assert program.wait() == 2
    assert "1 of 5 items cannot be used: 2.png" in program.printed()
    assert "Traceback" not in program.printed()
    assert quarantined(tiny_run) == ["2.png"]
    assert sorted(notes.read_text().splitlines()) == [f"0 {place}.png" for place in range(5)]

    (tiny_run.folder / "quarantine.jsonl").unlink()
    # A caption that is missing is left out, too, and counts with what is found later.
    (tiny_run.root / "data" / "4.txt").unlink()
    skip = ("data.on_bad_item=skip", "data.max_bad_ratio=0.5")
    program = forked(tiny_run, *settings, *skip, script=(HALF_BLIND, notes), num_processes=2)
    assert program.wait() == 0, program.printed()
    assert "2 of 5 items cannot be used: 2.png: " in program.printed()
    assert quarantined(tiny_run) == ["2.png", "4.png"]
    assert "3 items" in (tiny_run.folder / "contract.json").read_text()


def test_a_caption_that_the_pipeline_refuses_is_a_bad_item_and_such_a_prompt_ends_the_start(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(QwenImage, "refused_in_prompts", ("<|image_pad|>",))
    (tiny_run.root / "data" / "2.txt").write_text("a ring <|image_pad|>")
    assert tiny_run.train("train.steps=1") == 2
    assert "1 of 5 items cannot be used: 2.png: " in caplog.text
    assert "2.png: its caption holds <|image_pad|>, for which this family's pipeline" in caplog.text
    assert quarantined(tiny_run) == ["2.png"]
    assert "Loading" not in caplog.text

    skip = ("data.on_bad_item=skip", "data.max_bad_ratio=0.5", "train.steps=1")
    assert tiny_run.train(*skip, "validation.prompts=['a <|image_pad|>']") == 2
    assert "validation.prompts: number 1 holds <|image_pad|>" in caplog.text
    assert "Loading" not in caplog.text
    assert tiny_run.train(*skip) == 0
    assert quarantined(tiny_run) == ["2.png"]


def test_a_run_goes_on_when_the_folders_of_its_sources_have_moved(tiny_run: TinyRun) -> None:
    data, other = tiny_run.root / "data", tiny_run.root / "other"
    other.mkdir()
    for name in ("3.png", "3.txt", "4.png", "4.txt"):
        (data / name).rename(other / name)

    def sources(*folders: Path) -> tuple[str, ...]:
        listed = ", ".join(f"{{path: {folder}}}" for folder in folders)
        return f"data.sources=[{listed}]", "data.path=null"

    assert tiny_run.train(*sources(data, other), "train.steps=2") == 0
    data, other = data.rename(tiny_run.root / "moved"), other.rename(tiny_run.root / "renamed")
    assert tiny_run.train(*sources(data, other), "train.steps=3") == 0
    assert tiny_run.status()["step"] == 3
    assert tiny_run.train(*sources(other, data), "train.steps=4") == 2  # their order is that of the samples


def test_records_are_not_kept_while_the_run_trains(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_alive: list[int] = []

    def counted(module: ModuleType, name: str) -> Callable[..., Any]:
        original = getattr(module, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            gc.collect()
            alive = [each for each in gc.get_objects() if type(each) is Record]
            num_alive.append(sum(each.target.is_relative_to(tiny_run.root) for each in alive))
            return original(*args, **kwargs)

        return count

    for module, name in ((stages, "encode_run"), (run, "train")):
        monkeypatch.setattr(module, name, counted(module, name))
    assert tiny_run.train("train.steps=1") == 0
    assert num_alive == [5, 0]
