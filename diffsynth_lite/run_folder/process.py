"""This file identifies a process of a machine, also after its number was given to another one."""

import os
import re
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_TEXT = re.compile(r"process (?P<pid>[1-9]\d*) on (?P<host>.+?)(?:, started (?P<started>.+))?")
_START_FIELD = 22 - 3
"""Place of the start time in ``/proc/PID/stat``, after the name of the program, which may hold anything."""


@dataclass(frozen=True)
class Process:
    """One process of one machine: systems give the number of a process that ended to another one.

    Attributes:
        pid: its number, from 1.
        host: name of its machine.
        started: when it started, as its system writes it, for comparison only; empty where that is not known.
    """

    pid: int
    host: str
    started: str = ""

    @classmethod
    def current(cls) -> "Process":
        """The process that asks."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> "Process":
        """A process of this machine, such as a child that was just started."""
        return cls(pid, socket.gethostname(), _start(pid) or "")

    @classmethod
    def from_text(cls, text: str) -> "Process | None":
        """The process that ``as_text`` wrote; None for any other text."""
        found = _TEXT.fullmatch(text.strip())
        return None if found is None else cls(int(found["pid"]), found["host"], found["started"] or "")

    def as_text(self) -> str:
        """One line for a file."""
        return f"{self}, started {self.started}" if self.started else str(self)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def is_here(self) -> bool:
        """Whether it is, or was, a process of this machine."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether it runs; True also where that cannot be known: on another machine, or another user's."""
        if not self.is_here():
            return True
        started = _start(self.pid)
        return started is not None and (not started or not self.started or started == self.started)

    def interrupt(self) -> None:
        """Ask it to end as Ctrl+C does, if it is a process of this machine that runs."""
        if self.is_here() and self.is_alive():
            with suppress(ProcessLookupError):
                if sys.platform == "win32":  # There no process without a console gets SIGINT.
                    os.kill(self.pid, signal.CTRL_BREAK_EVENT)
                else:
                    os.kill(self.pid, signal.SIGINT)


def _start(pid: int) -> str | None:
    """When a process of this machine started; empty where that cannot be known, None if it does not run.

    A process that ended and whose exit code nobody has asked for does not run.
    """
    if sys.platform == "linux":
        return _start_on_linux(pid)
    import psutil  # takes some 20 ms, for nothing on Linux

    try:
        found = psutil.Process(pid)
        return None if found.status() == psutil.STATUS_ZOMBIE else f"{found.create_time():.6f}"
    except psutil.AccessDenied:
        return ""
    except psutil.Error:
        return None


def _start_on_linux(pid: int) -> str | None:
    """Clock ticks since the machine was booted, and which boot that was.

    Not by psutil, whose time moves with the clock of the machine from one process that asks to the next.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (OSError, OverflowError):  # of another user, or a number that no system gives
        pass
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # of another user, with hidepid
        return ""
    if after_name[0] in ("Z", "X"):
        return None
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{after_name[_START_FIELD]}"
