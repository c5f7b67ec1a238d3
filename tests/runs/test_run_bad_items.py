"""Whole runs on data of which not all can be used by all processes, and that move."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_run import TinyRun, forked

from diffsynth_lite.data import Record
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training import run, stages

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
