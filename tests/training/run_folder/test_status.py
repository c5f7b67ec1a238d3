"""The status in the run folder tells how the run ended."""

import errno
import json
from pathlib import Path

import pytest
import torch

from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.training.checkpoint.manifest import DifferentRunError
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.run_folder.folder import RunFolder
from diffsynth_lite.training.run_folder.progress import LiveStatus, StepResult, Throughput
from diffsynth_lite.training.run_folder.status import outcome_recorded, shortages_explained


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


def live(folder: Path, seconds: list[float]) -> tuple[Throughput, LiveStatus]:
    """A throughput, and a status whose clock shows one of these numbers each time."""
    throughput, times = Throughput(total_steps=9), iter(seconds)
    return throughput, LiveStatus(
        folder=RunFolder(folder), throughput=throughput, total_steps=9, clock=lambda: next(times)
    )


def steps(throughput: Throughput, status_of_run: LiveStatus, *numbers: int) -> None:
    for number in numbers:
        result = StepResult(
            step=number, loss=1.0, grad_norm=1.0, learning_rate=1e-4, num_samples=4, seconds=2.0
        )
        throughput.update(result)
        status_of_run.after_step(result)


def test_it_tells_step_and_speed_while_the_run_goes_on_and_not_after_every_step(tmp_path: Path) -> None:
    throughput, status_of_run = live(tmp_path, [100.0, 102.0, 104.9, 105.0])
    with recorded(tmp_path):
        steps(throughput, status_of_run, 4)
        written = status(tmp_path)
        assert (written["state"], written["exit_code"], written["step"]) == ("running", None, 4)
        assert (written["total_steps"], written["samples_per_s"], written["seconds_left"]) == (9, 2.0, 10)
        steps(throughput, status_of_run, 5, 6)
        assert status(tmp_path) == written
        steps(throughput, status_of_run, 7)
        assert (status(tmp_path)["step"], status(tmp_path)["seconds_left"]) == (7, 4)
        assert status(tmp_path)["time"] >= written["time"]
    assert "samples_per_s" not in status(tmp_path)


def test_a_status_that_cannot_be_written_stops_no_run_and_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    throughput, status_of_run = live(tmp_path, [0.0, 10.0, 20.0])
    with recorded(tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr("diffsynth_lite.training.run_folder.folder.write_json", full)
            steps(throughput, status_of_run, 4, 5)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        steps(throughput, status_of_run, 6)
        assert status(tmp_path)["step"] == 6


def test_a_full_disk_and_a_full_device_are_explained() -> None:
    with pytest.raises(RunStoppedError, match="no space left on the disk"), shortages_explained():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(RunStoppedError, match=r"before training.*vae_dtype"), shortages_explained():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
    with pytest.raises(RunStoppedError, match=r"before training.*vae_dtype"), shortages_explained():
        raise torch.OutOfMemoryError
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
