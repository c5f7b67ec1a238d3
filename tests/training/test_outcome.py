"""The status in the run folder tells how the run ended."""

import errno
import json
from pathlib import Path

import pytest
import torch

from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.training.checkpoints import CheckpointStore
from diffsynth_lite.training.contract import DifferentRunError
from diffsynth_lite.training.outcome import outcome_recorded, shortages_explained
from diffsynth_lite.training.run_folder import RunFolder


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def recorded(folder: Path):
    store = CheckpointStore(folder / "checkpoints", keep=2)
    return outcome_recorded(RunFolder(folder), store, start_step=3, total_steps=9)


def test_it_says_running_inside_and_finished_afterwards(tmp_path: Path) -> None:
    with recorded(tmp_path):
        assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("running", 3)
        assert status(tmp_path)["exit_code"] is None
    assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("finished", 9)
    assert status(tmp_path)["exit_code"] == 0


@pytest.mark.parametrize(
    ("error", "state", "code"),
    [
        (UserError("a wrong setting"), "failed", 2),
        (RunStoppedError("not finite"), "stopped", 3),
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


def test_a_full_disk_and_a_full_device_are_explained() -> None:
    with pytest.raises(RunStoppedError, match="no space left on the disk"), shortages_explained():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RunStoppedError, match=r"before training.*vae_dtype"), shortages_explained():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    with pytest.raises(UserError, match="cache/ab: Read-only file system"), shortages_explained():
        raise OSError(errno.EROFS, "Read-only file system", "cache/ab")
    with pytest.raises(TimeoutError), shortages_explained():
        raise TimeoutError(errno.ETIMEDOUT, "timed out")


def test_a_lost_data_worker_is_explained_and_a_bug_in_one_is_not() -> None:
    for message in (
        "DataLoader timed out after 300 seconds",
        "DataLoader worker (pid 7) is killed by signal: Killed.",
    ):
        with (
            pytest.raises(RunStoppedError, match=r"a data worker died or hangs \(DataLoader"),
            shortages_explained(),
        ):
            raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="Caught KeyError"), shortages_explained():
        raise RuntimeError("Caught KeyError in DataLoader worker process 0.")
    with pytest.raises(RunStoppedError, match="not finite"), shortages_explained():
        raise RunStoppedError("not finite")
