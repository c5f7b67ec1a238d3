"""Real launchers, and what they leave a run that is slower than they are patient."""

import sys
from pathlib import Path

import pytest
from processes import LIMIT_S
from tiny_run import TinyRun, forked, start

SLOW = str(Path(__file__).with_name("slow_train.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
SETTINGS = ("train.steps=4", "train.micro_batch_size=1", "validation.prompts=[]", "validation.loss_items=0")


def log_of(run: TinyRun, *command: str) -> str:
    process = start(run, *SETTINGS, command=command)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return errors


@pytest.mark.skipif(sys.platform != "linux", reason="an argument of the launcher is read in /proc")
def test_a_launcher_that_would_kill_two_processes_too_early_is_named_once(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The argument, which is read in /proc, and not the variable.
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    printed = log_of(tiny_run, *TORCHRUN, "--shutdown-timeout", "31", SLOW)
    (line,) = [line for line in printed.splitlines() if "grace" in line]
    assert "31 s grace < 47." in line
    assert "Set --shutdown-timeout" in line


@pytest.mark.parametrize("agent", [{}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_a_launcher_that_waits_and_one_process_without_a_launcher_are_told_nothing(
    agent: dict[str, str], tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = "600" if agent else "5"
    for name, value in (agent | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": seconds}).items():
        monkeypatch.setenv(name, value)
    program = forked(tiny_run, *SETTINGS, script=(SLOW,))
    assert program.wait() == 0, program.printed()
    assert "grace" not in program.printed()
