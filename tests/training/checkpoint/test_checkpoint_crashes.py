"""The store when its process is killed, its machine loses power, or its disk fails."""

import errno
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_model import Operation, Tree, crash_states, read_tree, record, write_tree
from processes import FORKED, LIMIT_S
from save_until_killed import kill_again_and_again

from diffsynth_lite.errors import CheckpointError, RunStoppedError
from diffsynth_lite.run_folder.loras import lora_copies
from diffsynth_lite.training.checkpoint.manifest import read_checkpoint
from diffsynth_lite.training.checkpoint.store import CheckpointStore

if sys.platform != "win32":
    import resource


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


def in_a_process(work: Callable[[Path], None], folder: Path) -> None:
    process = FORKED.Process(target=work, args=(folder,))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_kill_9_at_any_moment_loses_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    in_a_process(kill_again_and_again, tmp_path / "checkpoints")


def test_a_power_cut_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, operations = recorded_second_save(tmp_path / "checkpoints", monkeypatch)
    for done in range(len(operations) + 1):
        assert set(steps_after_a_power_cut(tmp_path, before, operations[:done])) <= {1, 2}
    assert set(steps_after_a_power_cut(tmp_path, before, operations)) == {2}


def test_a_power_cut_while_a_lora_is_kept_leaves_it_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = CheckpointStore(tmp_path / "checkpoints", keep=1), tmp_path / "lora" / "pictures" / "a.png"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"an image")
    save(store, 1)
    before = read_tree(store.folder)
    operations = record(monkeypatch, lambda: store.keep_lora(1, tmp_path / "lora", [file]))

    def kept_after(num_done: int) -> set[int]:
        """How many whole copies are there in each state that the disk may be in."""
        kept = set()
        for number, state in enumerate(crash_states(store.folder, before, operations[:num_done])):
            survived = tmp_path / f"survived {num_done} {number}"
            write_tree(survived, state)
            assert latest_step(survived) == 1
            copies = lora_copies(survived)
            assert all(read_checkpoint(copy.path).step == 1 for copy in copies)
            kept.add(len(copies))
        return kept

    assert set().union(*map(kept_after, range(len(operations)))) == {0, 1}
    assert kept_after(len(operations)) == {1}


@pytest.mark.parametrize("left_out", range(6))
def test_without_any_one_of_its_syncs_a_save_could_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: int
) -> None:
    """The control of the test above: each sync (files, manifest, folder, parent) is needed."""
    before, operations = recorded_second_save(tmp_path / "checkpoints", monkeypatch)
    syncs = [index for index, (name, *_) in enumerate(operations) if name == "sync"]
    del operations[syncs[left_out]]
    assert set(steps_after_a_power_cut(tmp_path, before, operations)) != {2}


def test_the_first_save_syncs_the_folder_that_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = record(monkeypatch, lambda: save(CheckpointStore(tmp_path / "checkpoints", keep=1), 1))
    for number, state in enumerate(crash_states(tmp_path, {}, operations)):
        survived = tmp_path / f"survived {number}"
        write_tree(survived, state)
        assert latest_step(survived / "checkpoints") == 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails_at_any_call_stops_the_run_and_leaves_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    messages: list[str] = []
    for num_good_calls in itertools.count():
        store = CheckpointStore(tmp_path / str(num_good_calls), keep=2)
        for step in (1, 2):
            save(store, step)
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, num_good_calls=num_good_calls, error=error)
            try:
                save(store, 3)
            except RunStoppedError as stopped:
                messages.append(str(stopped))
        if not disk.has_failed:
            break
        assert not list(store.folder.glob(".tmp-*"))
        assert {1, 2} <= set(store.steps())
        assert latest_step(store.folder) in (2, 3)
        save(store, 3)
        assert latest_step(store.folder) == 3
    # One folder made, four files written and synced, two folders synced, one rename; the rotation only warns.
    assert len(messages) == 1 + 4 * 2 + 2 + 1
    assert all("step-00000003" in message and os.strerror(error) in message for message in messages)


def save_with_a_file_size_limit(folder: Path) -> None:
    store = CheckpointStore(folder, keep=2)
    save(store, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    needed = r"needs about 19\.5 KiB, \d+\.\d GiB are free there; the checkpoints before it are intact"
    with pytest.raises(RunStoppedError, match=rf"checkpoint {folder}/step-00000002 could not .*{needed}"):
        store.save(2, {"adapter": {"a": torch.zeros(5000)}}, {})
    assert [entry.name for entry in folder.iterdir()] == ["step-00000001"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_real_write_that_does_not_fit_names_path_needed_and_free_bytes(tmp_path: Path) -> None:
    in_a_process(save_with_a_file_size_limit, tmp_path)
