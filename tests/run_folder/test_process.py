"""Processes that are known again, and not taken for another one with the same number."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
from processes import LIMIT_S

from diffsynth_lite.run_folder.process import Process


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    with subprocess.Popen(("sleep", str(LIMIT_S))) as started:
        yield started
        started.kill()


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_a_process_is_known_by_its_number_and_start_until_it_ends(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen, system: str
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    process = Process.of(child.pid)
    assert process.started
    assert Process.from_text(f"{process.as_text()}\n") == process
    assert process.is_alive()
    assert not replace(process, started="another time").is_alive()
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert process.is_alive()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.is_alive()  # though its number is taken until its parent asks how it ended
    child.wait()
    assert not process.is_alive()


def test_a_process_that_may_not_be_asked_is_taken_to_run(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen
) -> None:
    def refuse(pid: int) -> None:
        raise psutil.AccessDenied(pid)

    process = Process.of(child.pid)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "Process", refuse)
    assert process.is_alive()
    assert Process.of(child.pid).started == ""
