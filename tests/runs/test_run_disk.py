"""A run whose disk is full, or has lost what lies next to the checkpoints."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import few_files
from tiny_run import TinyRun, checkpoint_part, checkpoint_tensors, differing

from diffsynth_lite.config import load_config
from diffsynth_lite.pipelines.qwen_image import QwenImage
from diffsynth_lite.training.checkpoint.store import CheckpointStore, SavedBytes
from diffsynth_lite.training.checks import bind_family
from diffsynth_lite.training.saver import (
    num_best_copies_to_come,
    num_checkpoints_to_come,
    num_loras_to_come,
    warn_of_previews,
)


def test_a_disk_that_is_full_at_the_first_status_stops_the_run(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_args: object, **_settings: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("diffsynth_lite.run_folder.folder.write_json", full)
    assert tiny_run.train() == 3
    assert "no space left on the disk" in caplog.text


@pytest.mark.parametrize("num_free", [1, 3, 10])
def test_a_run_that_can_open_too_few_files_ends_with_one_line(
    tiny_run: TinyRun, caplog: pytest.LogCaptureFixture, num_free: int
) -> None:
    with few_files(num_free):
        assert tiny_run.train("data.num_workers=1") == 3
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "too many open files: this process, or a data worker, may open no more than" in line


def test_a_disk_without_room_for_checkpoints_is_refused_before_weights_load(
    begun_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("diffsynth_lite.training.saver.free_disk_bytes", lambda _: 2**10)
    monkeypatch.setattr(QwenImage, "load_transformer", None)
    assert begun_run.train() == 2
    assert "the checkpoints that exist at once and the LoRA files take about" in caplog.text
    assert "1.0 KiB are free" in caplog.text
    assert [row["step"] for row in begun_run.metrics() if "loss" in row] == [1, 2]


def test_what_a_run_saves_was_counted(whole_run: TinyRun) -> None:
    num_weights = sum(tensor.numel() for tensor in checkpoint_part(whole_run.folder, 6).values())
    saved = SavedBytes.of(
        num_weights,
        optimizer_bytes=2 * 4 * num_weights,
        lora_dtype=torch.float32,
        has_average=False,
    )
    for folder, counted in (("checkpoints/step-00000006", saved.checkpoint), ("lora", saved.lora)):
        found = sum(file.stat().st_size for file in (whole_run.folder / folder).glob("*.safetensors"))
        headers = 40_000  # names of layers, and a small image
        assert counted < found < counted + headers


@pytest.mark.parametrize(
    ("settings", "saved", "number"),
    [
        ((), 0, 3),  # one more than are kept, while it is written
        ((), 1, 2),
        ((), 2, 1),
        (("output.keep_checkpoints=9",), 0, 3),
        (("train.steps=7",), 3, 1),
        (("train.steps=5", "output.keep_every_steps=2"), 0, 3),
        (("train.steps=1000000000", "output.checkpoint_every_steps=1"), 0, 3),
        (("output.keep_checkpoints=1",), 0, 3),  # the newest that is known to be good stays
        (("train.steps=20", "output.keep_every_steps=4"), 0, 6),  # 4, 8, 12, and 16, 18, 20
        (("validation.data=data",), 0, 4),
    ],
)
def test_the_checkpoints_that_are_there_at_once_are_counted(
    tiny_run: TinyRun, settings: Sequence[str], saved: int, number: int
) -> None:
    config = load_config(tiny_run.config, settings).config
    assert num_checkpoints_to_come(config, num_there=saved, start_step=2 * saved) == number


@pytest.mark.parametrize(
    ("settings", "start_step", "num_there", "number"),
    [
        ((), 0, 0, 3),
        ((), 2, 1, 2),
        (("train.steps=7",), 6, 3, 1),
        (("train.steps=20", "output.keep_adapters=4"), 0, 0, 7),  # with the 3 checkpoints that exist at once
        (("train.steps=20", "output.keep_adapters=4"), 10, 5, 2),
        (("train.steps=20", "output.keep_adapters=0"), 0, 0, 3),
        ((), 6, 3, 0),
    ],
)
def test_the_copies_of_the_lora_that_are_there_at_once_are_counted(
    tiny_run: TinyRun, settings: Sequence[str], start_step: int, num_there: int, number: int
) -> None:
    config = load_config(tiny_run.config, settings).config
    found = num_loras_to_come(config, num_there=num_there, num_checkpoints=3, start_step=start_step)
    assert found == number


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        (("validation.data=data", "validation.every_steps=3"), 1),  # 3, as 6 is the end
        (
            ("validation.data=data", "validation.every_steps=1"),
            3,
        ),  # 1, 3 and 5, as the others are saved anyhow
        (("validation.data=data", "validation.every_steps=1", "output.keep_adapters=2"), 2),
        (("validation.data=data", "validation.every_steps=1", "output.keep_best=false"), 0),
        (("validation.every_steps=1",), 0),
    ],
)
def test_the_copies_of_the_lora_of_best_steps_are_counted(
    tiny_run: TinyRun, settings: Sequence[str], number: int
) -> None:
    config = load_config(tiny_run.config, settings).config
    assert num_best_copies_to_come(config, start_step=0) == number


def test_previews_that_may_fill_the_disk_are_a_warning(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(tiny_run.config).config
    monkeypatch.setattr("diffsynth_lite.training.saver.free_disk_bytes", lambda _: 2**15)
    run = SimpleNamespace(
        config=config,
        family=bind_family(config),
        store=CheckpointStore(tiny_run.folder / "checkpoints", keep=2),
        checked=SimpleNamespace(saved=SavedBytes(checkpoint=12, lora=4)),
    )
    warn_of_previews(run, SimpleNamespace(step=0))
    # Two images of 64 x 32 before the first step and after the last one.
    assert "previews may take up to 24.0 KiB next to the" not in caplog.text
    monkeypatch.setattr("diffsynth_lite.training.saver.free_disk_bytes", lambda _: 2**14)
    warn_of_previews(run, SimpleNamespace(step=0))
    assert "previews may take up to 24.0 KiB next to the" in caplog.text


def test_a_folder_renamed_inside_a_save_ends_the_run_and_is_not_made_again(
    begun_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save = CheckpointStore.save
    moved = begun_run.folder.with_name("moved")

    def renaming(store: CheckpointStore, *args: Any, **kwargs: Any) -> Path:
        path = save(store, *args, **kwargs)
        begun_run.folder.rename(moved)
        return path

    monkeypatch.setattr(CheckpointStore, "save", renaming)
    assert begun_run.train() == 3
    assert not begun_run.folder.exists()
    assert (moved / "checkpoints" / "step-00000004").is_dir()
    messages = [message for message in caplog.messages if "was renamed or removed" in message]
    assert len(messages) == 1


def test_a_run_goes_on_exactly_from_its_checkpoints_when_all_else_was_lost(
    begun_run: TinyRun,
    whole_run: TinyRun,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = rows_synced_before_each_checkpoint(begun_run.folder, monkeypatch)
    (begun_run.folder / "status.json").write_text("")
    (begun_run.folder / "contract.json").write_text("{")
    (begun_run.folder / "lineage.json").unlink()
    monkeypatch.setenv("INTERVAL", "1")
    rows = (begun_run.folder / "metrics.jsonl").read_bytes()
    (begun_run.folder / "metrics.jsonl").write_bytes(rows[: rows.index(b'"step": 2') + 20])
    assert begun_run.train("logging.every_steps=${oc.env:INTERVAL}") == 0
    assert "status.json is missing or damaged" in caplog.text
    assert "metrics.jsonl ends at step 1, and step 2 was logged: some rows were lost" in caplog.text
    for name in ("contract.json", "lineage.json"):
        assert json.loads((begun_run.folder / name).read_text())
    assert begun_run.status()["state"] == "finished"
    assert saved == [(4, 4, 4), (6, 6, 6)]
    found = checkpoint_tensors(begun_run.folder, 6)
    assert differing(checkpoint_tensors(whole_run.folder, 6), found) == []
    assert begun_run.train("train.steps=7") == 0  # The checkpoint says "${...}" of the interval.


def rows_synced_before_each_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, ...]]:
    """A list that gets the step of each checkpoint, and of the rows in metrics and layers synced by then."""
    files = [folder / "metrics.jsonl", folder / "layers.jsonl"]
    last_step: dict[Path, int] = {}
    saved: list[tuple[int, ...]] = []
    fsync, save = os.fsync, CheckpointStore.save

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        for file in files:
            if file.exists() and os.path.samestat(os.fstat(descriptor), file.stat()):
                last_step[file] = json.loads(file.read_text().splitlines()[-1])["step"]

    def noted_save(store: CheckpointStore, step: int, *args: Any, **kwargs: Any) -> Path:
        saved.append((step, *(last_step[file] for file in files)))
        return save(store, step, *args, **kwargs)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(CheckpointStore, "save", noted_save)
    return saved
