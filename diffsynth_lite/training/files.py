"""Files that appear whole or not at all, and survive a power cut once they have appeared."""

import json
import os
import sys
import uuid
from itertools import count
from pathlib import Path
from typing import Any

from diffsynth_lite.redaction import redacted

TEMPORARY_PREFIX = ".tmp-"
"""Names of files and folders being written; what a killed writer left of them means nothing."""


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk.

    Raises:
        OSError: the file exists, or could not be written in full; what was written of it remains.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder, new and renamed, are on the disk."""
    if sys.platform == "win32":
        return  # A folder cannot be opened there, and a rename is on the disk when it returns.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path, reason: str) -> Path:
    """Rename a file or folder to ``.<reason>-<name>-<n>``, n from 1 on; returns the new path."""
    aside = (path.with_name(f".{reason}-{path.name}-{number}") for number in count(1))
    return path.rename(next(free for free in aside if not free.exists()))


def write_text_atomic(path: Path, text: str) -> None:
    """Write a UTF-8 file, or replace it: readers see the old text or the new one, never a part.

    Raises:
        OSError: the text could not be written; the old file is as it was.
    """
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        write_durably(temporary, text.encode())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """Write a json file for people to read, as ``write_text_atomic`` does, with secrets masked.

    Raises:
        OSError: the file could not be written; the old one is as it was.
        ValueError: ``value`` holds a number that json has no way to write (NaN, infinity).
    """
    write_text_atomic(path, json.dumps(redacted(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n")
