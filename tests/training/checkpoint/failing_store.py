"""A store of small checkpoints on a disk that loses power, or that fails at some call."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_model import Operation, Tree, crash_states, read_tree, record, write_tree

from diffsynth_lite.errors import CheckpointError
from diffsynth_lite.training.checkpoint.store import CheckpointStore


def save(store: CheckpointStore, step: int) -> Path:
    tensors = {"adapter": {"a": torch.full((3,), float(step))}, "optimizer": {"a::step": torch.tensor(step)}}
    return store.save(step, tensors, {"state": {"step": step}})


def latest_step(folder: Path) -> int:
    """Step of the newest checkpoint, all of whose content belongs to that step."""
    checkpoint = CheckpointStore(folder, keep=1).latest()
    assert checkpoint is not None
    assert checkpoint.documents["state"]["step"] == checkpoint.step
    assert torch.equal(checkpoint.tensors("adapter")["a"], torch.full((3,), float(checkpoint.step)))
    assert checkpoint.tensors("optimizer")["a::step"] == checkpoint.step
    return checkpoint.step


def recorded_second_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Tree, list[Operation]]:
    """What the disk holds after the first save of a store that keeps one, and the calls of the second."""
    store = CheckpointStore(folder, keep=1)
    save(store, 1)
    before = read_tree(folder)
    operations = record(monkeypatch, lambda: save(store, 2))
    assert [name for name, *_ in operations].count("sync") == 6
    assert latest_step(folder) == 2
    return before, operations


def steps_after_a_power_cut(
    tmp_path: Path, before: Tree, operations: Sequence[Operation]
) -> list[int | None]:
    """Newest step (None: nothing loadable) in each state that the disk may be in after the operations."""
    steps: list[int | None] = []
    for state in crash_states(tmp_path / "checkpoints", before, operations):
        survived = tmp_path / f"survived {len(list(tmp_path.iterdir()))}"
        write_tree(survived, state)
        try:
            steps.append(latest_step(survived))
        except CheckpointError:
            steps.append(None)
    return steps


class FailingDisk:
    """Lets the first calls through, and fails the one after them; a failing write stores half first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, num_good_calls: int, error: int) -> None:
        self.num_left = num_good_calls
        self.has_failed = False
        self._error = error
        for name in ("mkdir", "write", "fsync", "rename"):
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))

    def _failing(self, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.num_left -= 1
            if self.num_left != -1:
                return call(*args, **kwargs)
            self.has_failed = True
            if call.__name__ == "write":
                call(args[0], args[1][: len(args[1]) // 2])
            raise OSError(self._error, os.strerror(self._error))

        return wrapped
