"""This file locks a file for as long as a process has it open, and writes into it which process that is."""

import logging
import os
import sys
from pathlib import Path
from typing import IO, NamedTuple

from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.process import Process

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger(__name__)

_LOCKED_BYTE = 1 << 20
"""The byte that is locked on Windows, where others cannot read what is locked: far beyond the text."""


class OpenLock(NamedTuple):
    """A lock file of this process; the lock ends when it is closed, or with the process, however it ends.

    Attributes:
        is_locked: False where the file system does not support locks.
    """

    file: IO[str]
    is_locked: bool


def open_lock(path: Path, *, place: str) -> OpenLock:
    """Make or take a lock file; logs a warning where locks are not supported.

    Args:
        place: what it locks, for the message.

    Raises:
        UserError: another process holds it.
        OSError: it cannot be opened.
    """
    file = path.open("a+", encoding="utf-8")
    try:
        is_locked = _is_locked(file, path, place)
        file.truncate(0)
        file.write(f"{Process.current().as_text()}\n")
        file.flush()
    except BaseException:
        file.close()
        raise
    return OpenLock(file, is_locked)


def _is_locked(file: IO[str], path: Path, place: str) -> bool:
    try:
        _lock(file)
    except BlockingIOError:
        file.seek(0)
        text = file.read().strip()
        raise UserError(f"{place} is in use by {Process.from_text(text) or text}") from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): start nothing else there", path, error.strerror)
        return False
    return True


def _lock(file: IO[str]) -> None:
    """Lock a file for as long as it is open.

    Raises:
        BlockingIOError: another process has locked it.
    """
    if sys.platform == "win32":
        place = os.lseek(file.fileno(), 0, os.SEEK_CUR)
        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError from error
        finally:
            os.lseek(file.fileno(), place, os.SEEK_SET)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
