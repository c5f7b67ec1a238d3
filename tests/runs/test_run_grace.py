"""What a launcher leaves a run that is slower than it is patient."""

from pathlib import Path

import pytest
from tiny_run import TinyRun, forked

SLOW = str(Path(__file__).with_name("slow_train.py"))
SETTINGS = ("train.steps=4", "train.micro_batch_size=1")


def test_a_launcher_that_would_kill_two_processes_too_early_is_named_once(
    tiny_run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "31")
    program = forked(tiny_run, *SETTINGS, script=(SLOW,), num_processes=2)
    assert program.wait() == 0, program.printed()
    (line,) = [line for line in program.printed().splitlines() if "grace" in line]
    assert "31 s grace < 47." in line
    assert "Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in line


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
