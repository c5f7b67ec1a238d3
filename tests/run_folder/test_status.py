"""The status in the run folder tells how the run ended."""

import errno
import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from diffsynth_lite.errors import (
    DifferentRunError,
    RunDivergedError,
    RunInterrupted,
    RunStoppedError,
    UserError,
)
from diffsynth_lite.run_folder.folder import RunFolder, outcome_recorded
from diffsynth_lite.training.checkpoint.store import CheckpointStore


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def recorded(folder: Path):
    store = CheckpointStore(folder / "checkpoints", keep=2)
    return outcome_recorded(
        RunFolder(folder), lambda: max(store.steps(), default=0), start_step=3, total_steps=9
    )


def test_it_says_running_inside_and_finished_afterwards(tmp_path: Path) -> None:
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
