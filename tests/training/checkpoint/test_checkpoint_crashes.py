"""The store when its process is killed, its machine loses power, or its disk fails."""

import errno
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from disk_model import crash_states, record, write_tree
from failing_store import FailingDisk, latest_step, recorded_second_save, save, steps_after_a_power_cut
from processes import LIMIT_S

import diffsynth_lite
from diffsynth_lite.errors import RunStoppedError
from diffsynth_lite.training.checkpoint.store import CheckpointStore


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a script that finds the package, installed or not."""
    environment = {**os.environ, "PYTHONPATH": str(Path(diffsynth_lite.__file__).parents[1])}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment
    )


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_kill_9_at_any_moment_loses_no_acknowledged_checkpoint(tmp_path: Path) -> None:
    script = Path(__file__).with_name("save_until_killed.py")
    command = [sys.executable, str(script), str(tmp_path / "checkpoints"), "20"]
    done = run(command)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20


def test_a_power_cut_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, operations = recorded_second_save(tmp_path / "checkpoints", monkeypatch)
    for done in range(len(operations) + 1):
        assert set(steps_after_a_power_cut(tmp_path, before, operations[:done])) <= {1, 2}
    assert set(steps_after_a_power_cut(tmp_path, before, operations)) == {2}


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


SAVE_WITH_A_FILE_SIZE_LIMIT = """
import resource, sys
from pathlib import Path
import torch
from diffsynth_lite.training.checkpoint.store import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
store.save(1, {"adapter": {"a": torch.zeros(8)}}, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store.save(2, {"adapter": {"a": torch.zeros(5000)}}, {})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_real_write_that_does_not_fit_names_path_needed_and_free_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVE_WITH_A_FILE_SIZE_LIMIT, str(tmp_path)]
    done = run(command)
    message = done.stderr.strip().splitlines()[-1]
    assert message.startswith(
        f"diffsynth_lite.errors.RunStoppedError: checkpoint {tmp_path / 'step-00000002'}"
    )
    assert re.search(
        r"needs about 19.5 KiB, \d+\.\d GiB are free there; the checkpoints before it are intact", message
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
