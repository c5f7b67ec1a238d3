"""The run folder: its lock, its status, and whose it is."""

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import FORKED, LIMIT_S

from diffsynth_lite.errors import (
    DifferentRunError,
    RunDivergedError,
    RunInterrupted,
    RunStoppedError,
    UserError,
)
from diffsynth_lite.run_folder import lock
from diffsynth_lite.run_folder.folder import RunFolder, outcome_recorded, preparation_recorded
from diffsynth_lite.training.checkpoint.store import CheckpointStore


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "first")


def start(folder: RunFolder) -> None:
    with folder.lock():
        start_without_lock(folder)


def start_without_lock(folder: RunFolder) -> None:
    folder.write_status("running", exit_code=None, step=0, message="training")


def test_the_status_shows_the_state_of_the_run_and_where_its_files_are(folder: RunFolder) -> None:
    start(folder)
    folder.lora_folder.mkdir()
    folder.metrics_file.touch()
    began_at = time.time()
    folder.write_status("finished", exit_code=0, step=300, message="done")
    expected = {
        "state": "finished",
        "exit_code": 0,
        "step": 300,
        "message": "done",
        "found_at": {"lora": "lora", "metrics": "metrics.jsonl"},
    }
    written = json.loads(folder.status_file.read_text())
    assert folder.read_status() == written
    assert round(began_at, 3) <= written.pop("time") <= round(time.time(), 3)
    assert written == expected


def test_a_run_folder_can_be_moved(folder: RunFolder, tmp_path: Path) -> None:
    start(folder)
    moved = RunFolder(folder.path.rename(tmp_path / "moved"))
    assert moved.holds_run()
    for file in moved.path.iterdir():
        assert str(folder.path).encode() not in file.read_bytes()
    start(moved)


def test_a_folder_whose_removal_begins_with_the_lock_is_left_as_it_is(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with folder.lock():
        (folder.path / ".lock").unlink()
        monkeypatch.setattr(time, "sleep", lambda _: shutil.rmtree(folder.path))
        with pytest.raises(RunStoppedError, match="renamed or removed"):
            start_without_lock(folder)
        assert not folder.path.exists()


@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_folder_that_a_library_made_again_is_left_as_it_is(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with folder.lock():
        start_without_lock(folder)
        if is_renamed:
            folder.path.rename(folder.path.with_name("moved"))
        else:
            shutil.rmtree(folder.path)
        folder.lora_folder.mkdir(parents=True)
        with pytest.raises(RunStoppedError, match="renamed or removed"):
            folder.require_held()
        assert [path.name for path in folder.path.iterdir()] == ["lora"]


def test_a_lock_that_somebody_removed_is_taken_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with folder.lock():
        start_without_lock(folder)
        (folder.path / ".lock").unlink()
        start_without_lock(folder)
        assert "was removed; it is made again" in caplog.text
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
            start(RunFolder(folder.path))
    start(RunFolder(folder.path))


def test_a_new_folder_is_made_and_holds_a_run_once_its_status_is_written(folder: RunFolder) -> None:
    assert not folder.holds_run()
    assert folder.read_status() is None
    with folder.lock():
        assert not folder.holds_run()
        folder.write_status("running", exit_code=None, step=0, message="training")
        assert folder.holds_run()


def test_what_ended_before_its_first_status_does_not_block_the_folder(folder: RunFolder) -> None:
    with folder.lock():
        (folder.path / ".tmp-status.json-0123abcd").write_text("{")
        folder.quarantine_file.write_text("{}")  # bad items, which somebody has repaired meanwhile
        assert not folder.has_lost_status()
    start(folder)
    assert folder.holds_run()


@pytest.mark.parametrize("name", ["photo.png", "config.yaml", ".hidden", "checkpoints/"])
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(folder: RunFolder, name: str) -> None:
    folder.path.mkdir(parents=True)
    foreign = folder.path / name
    foreign.mkdir() if name.endswith("/") else foreign.write_text("precious")
    with pytest.raises(UserError, match="not empty and holds no run"), folder.lock():
        pytest.fail("the lock was given")
    assert list(folder.path.iterdir()) == [foreign]


@pytest.mark.parametrize(("below", "message"), [("", "is a file"), ("a", "cannot be made: Not a directory")])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, below: str, message: str) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(UserError, match=message), RunFolder(file / below).lock():
        pytest.fail("the lock was given")
    assert file.read_text() == "precious"


class MicrosoftLocks:
    """Stands in for ``msvcrt``, with locks of whole files."""

    LK_NBLCK = 2

    def locking(self, descriptor: int, mode: int, num_bytes: int) -> None:
        assert (os.lseek(descriptor, 0, os.SEEK_CUR), mode, num_bytes) == (1 << 20, self.LK_NBLCK, 1)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError from None


def pretend_windows() -> None:
    """Have locks be taken as on Windows, until this process ends."""
    lock.sys = SimpleNamespace(platform="win32")
    lock.msvcrt = MicrosoftLocks()


def hold_the_lock(folder: RunFolder, system: str, is_locked: Any) -> None:
    if system == "win32":
        pretend_windows()
    with folder.lock():
        is_locked.set()
        time.sleep(LIMIT_S)


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_a_second_trainer_is_refused_by_name_of_the_first_until_that_one_is_killed(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    if system == "win32":
        monkeypatch.setattr(lock, "sys", None)
        monkeypatch.setattr(lock, "msvcrt", None, raising=False)
        pretend_windows()
    start(folder)
    is_locked = FORKED.Event()
    first = FORKED.Process(target=hold_the_lock, args=(folder, system, is_locked))
    first.start()
    try:
        assert is_locked.wait(LIMIT_S)
        for _ in range(2):
            with pytest.raises(UserError) as caught, folder.lock():
                pytest.fail("the lock was given")
            assert str(caught.value).endswith(f"in use by process {first.pid} on {socket.gethostname()}")
            assert not folder.is_abandoned()
    finally:
        first.kill()
        first.join()
    assert folder.is_abandoned()
    start(folder)


def test_what_killed_writers_left_is_removed_by_the_next_who_has_the_lock(folder: RunFolder) -> None:
    start(folder)
    others = (".tmp-mine", ".tmp-status.json", "status.json", ".lock")
    for name in (*others[:2], ".tmp-status.json-470da7f3", ".tmp-metrics.jsonl-0123abcd"):
        (folder.path / name).touch()
    folder.previews_folder.mkdir()
    for name in ("grid.png", ".tmp-grid.png-0123abcd"):
        (folder.previews_folder / name).touch()
    (folder.lora_folder / "pictures").mkdir(parents=True)
    for name in ("README.md", ".tmp-README.md-0123abcd", "pictures/.tmp-prompt-00.png-0123abcd"):
        (folder.lora_folder / name).touch()
    start(folder)
    assert sorted(path.name for path in folder.path.iterdir()) == sorted((*others, "previews", "lora"))
    assert [path.name for path in folder.previews_folder.iterdir()] == ["grid.png"]
    assert [path.name for path in folder.lora_folder.rglob("*") if path.is_file()] == ["README.md"]


def test_the_lock_is_free_again_after_an_exception(folder: RunFolder) -> None:
    with pytest.raises(RuntimeError, match="trained badly"), folder.lock():
        raise RuntimeError("trained badly")
    start(folder)


def test_a_file_system_without_locks_is_warned_about(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", fail)
    start(folder)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "cannot be locked (Function not implemented)" in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"hello": 1}'])
def test_a_folder_with_somebody_elses_status_is_not_a_run_and_left_as_it_is(
    folder: RunFolder, content: str
) -> None:
    folder.path.mkdir(parents=True)
    folder.status_file.write_text(content)
    assert folder.read_status() is None
    with pytest.raises(UserError, match="holds no run"), folder.lock():
        pytest.fail("the folder was taken")
    assert folder.status_file.read_text() == content


@pytest.mark.parametrize("content", [None, "", '{"found_at"', '["found_at"]'])
def test_a_run_whose_status_was_lost_before_its_first_checkpoint_is_still_one(
    folder: RunFolder, content: str | None
) -> None:
    start(folder)
    folder.fingerprint_file.write_text("{}")
    folder.status_file.unlink()
    if content is not None:
        folder.status_file.write_text(content)
    assert folder.has_lost_status()
    start(folder)
    assert folder.read_status() is not None
    assert not folder.has_lost_status()


def test_a_folder_that_is_gone_or_has_become_another_runs_is_not_written_to(folder: RunFolder) -> None:
    with folder.lock():
        start_without_lock(folder)
        moved = RunFolder(folder.path.rename(folder.path.with_name("moved")))
        with pytest.raises(RunStoppedError, match="renamed or removed"):
            start_without_lock(folder)
        assert not folder.path.exists()
        folder.path.mkdir()
        (folder.path / ".lock").write_text("process 1 on elsewhere\n")
        with pytest.raises(RunStoppedError, match="process 1 on elsewhere has begun a run under its name"):
            start_without_lock(folder)
        assert not folder.status_file.exists()
    start(moved)


def test_checkpoints_make_up_for_a_status_that_was_lost(folder: RunFolder) -> None:
    checkpoint = folder.checkpoints_folder / "step-00000002"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match="holds no run"):
        start(folder)
    (checkpoint / "COMPLETE").touch()
    for content in (None, "", '{"found_at"'):
        folder.status_file.unlink(missing_ok=True)
        if content is not None:
            folder.status_file.write_text(content)
        assert folder.holds_run()
        assert folder.read_status() is None
        with folder.lock():
            pass
    start(folder)
    assert folder.read_status() is not None


def test_what_is_in_the_place_of_files_and_folders_is_named_at_once(folder: RunFolder) -> None:
    start(folder)
    folder.lora_folder.symlink_to("nowhere")
    folder.previews_folder.touch()
    folder.metrics_file.mkdir()
    folder.lineage_file.symlink_to(folder.lineage_file)
    named = r"previews is not a folder; .*lora is not a f.*lineage\.json is not a file; .*metrics\.jsonl is"
    with pytest.raises(UserError, match=named), folder.lock():
        pytest.fail("the folder was taken")


def test_a_lock_that_leads_elsewhere_is_refused_and_empties_nothing(
    folder: RunFolder, tmp_path: Path
) -> None:
    start(folder)
    (tmp_path / "mine.txt").write_text("mine")
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(UserError, match=r"\.lock is not a regular file"), folder.lock():
        pytest.fail("the folder was taken")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_copy_without_hidden_files_still_holds_the_run(folder: RunFolder, tmp_path: Path) -> None:
    start(folder)
    copied = shutil.copytree(folder.path, tmp_path / "copy", ignore=shutil.ignore_patterns(".*"))
    assert RunFolder(copied).holds_run()
    start(RunFolder(copied))


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def recorded(folder: Path):
    store = CheckpointStore(folder / "checkpoints", keep=2)
    return outcome_recorded(
        RunFolder(folder), lambda: max(store.steps(), default=0), start_step=3, total_steps=9
    )


def test_the_status_is_running_inside_and_finished_afterwards(tmp_path: Path) -> None:
    with recorded(tmp_path):
        assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("running", 3)
        assert status(tmp_path)["exit_code"] is None
        progress = {"samples_per_s": 2.0}
        RunFolder(tmp_path).write_status("running", exit_code=None, step=4, message="", progress=progress)
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 9)
    assert status(tmp_path)["exit_code"] == 0
    assert "samples_per_s" not in status(tmp_path)


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (UserError("a wrong setting"), "failed", 2),
        (RunStoppedError("no space left"), "stopped", 3),
        (RunDivergedError("not finite"), "diverged", 3),
        (RunInterrupted("stopped after step 4"), "interrupted", 75),
        (KeyError("a bug"), "failed", 1),
        (KeyboardInterrupt(), "failed", 1),
    ],
)
def test_each_end_has_its_state_and_exit_code(
    tmp_path: Path, error: BaseException, state: str, code: int
) -> None:
    CheckpointStore(tmp_path / "checkpoints", keep=2).save(4, {"adapter": {"a": torch.zeros(1)}}, {})
    with pytest.raises(type(error)), recorded(tmp_path):
        raise error
    written = status(tmp_path)
    assert (written["state"], written["exit_code"], written["step"]) == (state, code, 4)
    assert written["message"]


def test_a_different_run_leaves_the_status_as_it_was(tmp_path: Path) -> None:
    with recorded(tmp_path):
        pass
    before = status(tmp_path)
    with pytest.raises(DifferentRunError), recorded(tmp_path):
        raise DifferentRunError("another rank")
    assert status(tmp_path) == before


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize(
    ("error", "state", "state_of_run"),
    [
        (None, None, "finished"),
        (UserError("model.path: gated"), "failed", "finished"),
        (RunInterrupted("STOP"), "interrupted", "interrupted"),
    ],
)
def test_what_is_prepared_shows_in_the_status_and_leaves_it_as_it_was_unless_it_ends_there(
    tmp_path: Path, has_run: bool, error: BaseException | None, state: str | None, state_of_run: str
) -> None:
    if has_run:
        with recorded(tmp_path):
            pass
    folder = RunFolder(tmp_path)
    before = folder.read_status()
    with suppress(UserError, RunInterrupted), preparation_recorded(folder, lambda: 0):
        folder.write_status("running", exit_code=None, step=0, message="downloading")
        if error is not None:
            raise error
    after = folder.read_status()
    assert (after and after["state"]) == (state_of_run if has_run else state)
    assert error is not None or after == before


@pytest.mark.parametrize("error", [RunStoppedError("no space left"), None])
def test_a_full_disk_takes_the_last_status_over_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with suppress(RunStoppedError), recorded(tmp_path):
        monkeypatch.setattr("diffsynth_lite.files.write_bytes", full)
        if error:
            raise error
    assert status(tmp_path)["state"] == ("stopped" if error else "finished")


def test_a_different_run_in_a_folder_without_a_status_has_failed(tmp_path: Path) -> None:
    with pytest.raises(DifferentRunError), recorded(tmp_path):
        raise DifferentRunError("another rank")
    assert status(tmp_path)["state"] == "failed"


def test_the_node_of_a_run_is_named_where_it_is_another_machine(folder: RunFolder) -> None:
    assert (folder.node, folder.trains()) == ("", False)
    with folder.lock():
        start_without_lock(folder)
        assert (folder.node, folder.trains(), folder.trains_here()) == ("", True, True)
    (folder.path / ".lock").write_text("process 7 on node-3, started then\n")
    assert (folder.node, folder.trains(), folder.trains_here()) == ("node-3", True, False)
    folder.status_file.write_text('{"state": "finished"}')
    assert (folder.node, folder.trains()) == ("node-3", False)
