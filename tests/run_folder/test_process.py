"""Processes that are known again, and not taken for another one with the same number."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from processes import LIMIT_S

from diffsynth_lite.run_folder.process import Process

_CREATED = 0x01DC5D7A_9C3E0123
"""Units of 100 ns since 1601."""


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


class Kernel:
    """Stands in for ``kernel32``, with the processes 42 and, of another user, 4."""

    exit_code = 259  # still active

    def __init__(self) -> None:
        self.handles: list[object] = []
        self.OpenProcess = lambda access, inherited, pid: self._open(access, pid)

    def _open(self, access: int, pid: int) -> int | None:
        assert access == 0x1000  # enough for both questions, also about other users' processes
        if pid == 42:
            self.handles.append(7)
        return 7 if pid == 42 else None

    def GetExitCodeProcess(self, handle: ctypes.c_void_p, exit_code: Any) -> None:
        assert handle.value == 7
        exit_code._obj.value = self.exit_code

    def GetProcessTimes(self, handle: ctypes.c_void_p, created: Any, *_: object) -> None:
        assert handle.value == 7
        created._obj.dwHighDateTime, created._obj.dwLowDateTime = divmod(_CREATED, 1 << 32)

    def CloseHandle(self, handle: ctypes.c_void_p) -> None:
        self.handles.remove(handle.value)


def test_windows_is_asked_for_the_time_of_creation(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "WinDLL", lambda *_, **__: kernel, raising=False)
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 87, raising=False)  # no such process
    process = Process.of(42)
    assert process.started == str(_CREATED)
    assert process.is_alive()
    assert not replace(process, started="1").is_alive()
    assert not replace(process, pid=4).is_alive()
    monkeypatch.setattr(ctypes, "get_last_error", lambda: 5)  # access denied
    assert replace(process, pid=4).is_alive()
    kernel.exit_code = 75
    assert not process.is_alive()
    assert kernel.handles == []
