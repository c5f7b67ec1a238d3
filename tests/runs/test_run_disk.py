"""A run whose disk is full, or has lost what lies beside the checkpoints."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun, checkpoint_tensors, differing

from diffsynth_lite.training.checkpoint.store import CheckpointStore


def test_a_disk_that_is_full_at_the_first_status_stops_the_run(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_args: object, **_settings: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("diffsynth_lite.run_folder.folder.write_json", full)
    assert tiny_run.train() == 3
    assert "no space left on the disk" in caplog.text


def test_a_disk_without_room_for_two_checkpoints_is_refused_before_the_first_step(
    begun_run: TinyRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("diffsynth_lite.training.checkpoint.saver.free_disk_bytes", lambda _: 2**10)
    assert begun_run.train() == 2
    assert "a checkpoint with the LoRA files take about" in caplog.text
    assert "1.0 KiB are free" in caplog.text
    assert [row["step"] for row in begun_run.metrics() if "loss" in row] == [1, 2]


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
    rows = (begun_run.folder / "metrics.jsonl").read_bytes()
    (begun_run.folder / "metrics.jsonl").write_bytes(rows[: rows.index(b'"step": 2') + 20])
    assert begun_run.train() == 0
    assert "status.json is missing or damaged" in caplog.text
    assert "metrics.jsonl ends at step 1, and step 2 was logged: rows are lost" in caplog.text
    for name in ("contract.json", "lineage.json"):
        assert json.loads((begun_run.folder / name).read_text())
    assert begun_run.status()["state"] == "finished"
    assert saved == [(4, 4, 4), (6, 6, 6)]
    found = checkpoint_tensors(begun_run.folder, 6)
    assert differing(checkpoint_tensors(whole_run.folder, 6), found) == []


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
