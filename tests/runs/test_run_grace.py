"""Real launchers, and what they leave a run that is slower than they are patient."""

import sys
from pathlib import Path

import pytest
from tiny_run import TinyRun, start

SLOW = str(Path(__file__).with_name("slow_train.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SETTINGS = ("train.steps=4", "train.micro_batch_size=1", "validation.prompts=[]", "validation.loss_items=0")


def log_of(run: TinyRun, *command: str, folder: str) -> str:
    process = start(run, *SETTINGS, f"output.dir={run.root / folder}", command=command)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return errors


@pytest.mark.skipif(sys.platform != "linux", reason="an argument of the launcher is read in /proc")
def test_a_launcher_that_would_kill_two_processes_too_early_is_named_once_and_one_that_waits_is_not(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    (line,) = [
        line for line in log_of(tiny_run, *TORCHRUN, SLOW, folder="default").splitlines() if "grace" in line
    ]
    assert "30 s grace < 47." in line
    assert "Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 where it is launched" in line

    assert "grace" not in log_of(tiny_run, *TORCHRUN, "--shutdown-timeout", "600", SLOW, folder="argument")


def test_one_process_without_a_launcher_is_told_nothing(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "5")
    assert "grace" not in log_of(tiny_run, sys.executable, SLOW, folder="alone")
