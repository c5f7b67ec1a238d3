"""This file locks files: a lock ends with the last process that has the file open, however that ends."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_PAUSE_S = 0.02
_LOCKED_BYTE = 1 << 20
"""On Windows, where others cannot read what is locked: far beyond the text."""


def take_lock(file: IO[Any]) -> bool:
    """Lock an open file; False where another one has locked it.

    On POSIX the lock goes on in processes that inherit the file; on Windows it does not.
    """
    try:
        if sys.platform == "win32":
            os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Scope in which nobody else has the lock of a file, which is made if need be; waits for it."""
    with path.open("ab") as file:
        while not take_lock(file):
            time.sleep(_PAUSE_S)
        yield


def is_locked(path: Path) -> bool:
    """Whether a process has the lock of a file.

    It takes the lock for a moment: who takes it, and who asks, do so one after the other.
    """
    try:
        with path.open("r+b") as file:
            return not take_lock(file)
    except FileNotFoundError:
        return False
