"""Files that appear whole or not at all, and how files are read that somebody else may have written.

There are two promises for files that are written. *Whole*: a reader, or the next start after a kill, finds
the old file or the new one, never a part (``replacing``). *Durable*: that also holds after a power cut, and
the new file is on the disk when the call returns, because the file and then its folder are synced
(``write_bytes``, ``write_text``, ``write_json``).

Durable are the files that a run cannot make again: checkpoints, the exported LoRA, status, fingerprint. The
content of a cache entry is synced too, for it is dear, but not its folder: an entry that has no name is made
again. The files copied out of a dataset are synced once for all of them. Previews are only whole.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors of a disk that takes no more, of a quota, and of a limit on the size of files."""

_MOST_NESTED = 32
"""Lists and objects of json within each other: files of the quickstart nest 4 deep. yaml, and much else, is
written by recursion, of which Python takes 1,000 levels."""
_YOUNG_S = 24 * 3600
_UNFINISHED_NAME = re.compile(r"\.tmp-.+-[0-9a-f]{8}", re.DOTALL)


def temporary_path(path: Path) -> Path:
    """A new name next to ``path``, to write to before the rename; see :func:`is_unfinished`."""
    return path.with_name(f".tmp-{path.name}-{uuid.uuid4().hex[:8]}")


def is_unfinished(name: str) -> bool:
    """Whether a file or folder is one that a killed writer left: nothing reads it, and it may be removed."""
    return _UNFINISHED_NAME.fullmatch(name) is not None


def is_abandoned(path: Path) -> bool:
    """Whether a file was left unfinished by a writer more than a day ago."""
    return is_unfinished(path.name) and not is_young(path)


def is_young(path: Path) -> bool:
    """Whether a file was written within a day, so that a process may still be writing it, or is gone."""
    try:
        return time.time() - path.stat().st_mtime <= _YOUNG_S
    except FileNotFoundError:
        return True


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write a file to; it replaces ``path`` when the block ends without an error."""
    temporary = temporary_path(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, or replace it, durably.

    Raises:
        OSError: it could not be written; the old file is as it was.
    """
    with replacing(path) as temporary:
        write_synced(temporary, content)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, or replace it, durably; line breaks stay as they are."""
    write_bytes(path, text.encode())


def write_new(path: Path, content: bytes) -> None:
    """Write a file durably under a name that nobody has.

    Raises:
        FileExistsError: the name is taken.
        OSError: it could not be written; there is no such file.
    """
    temporary = temporary_path(path)
    try:
        write_synced(temporary, content)
        link_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def link_new(temporary: Path, path: Path) -> None:
    """Give a file a name, in one step that a crash cannot cut in two where the disk has such a step.

    Raises:
        FileExistsError: the name is taken, whoever else wants it now.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # FAT and some network disks have no second names; another reason comes again below.
        path.open("xb").close()
        temporary.replace(path)


def write_json(path: Path, value: Any) -> None:
    """Write a json file for people to read, or replace it, durably and with secrets masked.

    Raises:
        ValueError: ``value`` holds a number that json has no way to write (NaN, infinity).
    """
    write_text(path, _json(value))


def write_json_over(path: Path, value: Any) -> None:
    """Write over a json file where it is, where a full disk has no room for another: a kill tears it.

    Raises:
        OSError: it is not there, or could not be written.
    """
    with path.open("r+b") as file:
        file.write(_json(value).encode())
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def signed_line(line: bytes) -> bytes:
    """Content of a file that shows whether it is whole: a line, and the sha256 of it on the second one."""
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file and wait until its content is on the disk; its name is once the folder is synced too.

    Raises:
        OSError: the file exists, or could not be written in full; the part that was written remains.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[os.write(descriptor, unwritten) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, new and renamed, are on the disk."""
    if sys.platform == "win32":
        return  # Nothing opened for reading can be synced there.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def set_aside(path: Path, reason: str) -> Path:
    """Rename a file or folder to ``.<reason>-<name>-<n>``, n from 1 on; returns the new path."""
    aside = (path.with_name(f".{reason}-{path.name}-{number}") for number in count(1))
    return path.rename(next(free for free in aside if not free.exists()))


def require_file(path: Path, *, most_bytes: int) -> None:
    """Check that a path leads to a regular file that may be read in whole.

    Nothing is opened for that: a named pipe waits for a writer, and a device may have no end.

    Raises:
        UserError: it is something else, or has more bytes.
        OSError: nothing is there, or it cannot be reached.
    """
    try:
        status = path.stat()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{path} is a link to itself") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is not a regular file")
    if status.st_size > most_bytes:
        raise UserError(f"{path} is too large: {status.st_size:,} bytes, where {most_bytes:,} are the most")


def read_bytes(path: Path, *, most_bytes: int) -> bytes:
    """Content of a file that somebody else may have written; see :func:`require_file`.

    Raises:
        UserError: it is not a regular file, or has more bytes.
        OSError: it is not there, or cannot be read.
    """
    require_file(path, most_bytes=most_bytes)
    with path.open("rb") as file:
        # Its size then: a run may have replaced it. Files of the kernel have none, and some have no end.
        return file.read(os.fstat(file.fileno()).st_size)


def file_fingerprint(path: Path) -> str:
    """The sha256 of the bytes of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str | bytes) -> Any:
    """The value of a json text that somebody else may have written.

    Raises:
        ValueError: it is not json, or is nested deeper than any file of ours: most code recurses over it.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [
            inner
            for held in level
            if isinstance(held, list | dict)
            for inner in (held.values() if isinstance(held, dict) else held)
        ]
        if not level:
            return value
    raise ValueError("nested too deeply")


def free_disk_bytes(folder: Path) -> int:
    """Bytes that are free for a folder, which may not exist yet."""
    folder = folder.expanduser().absolute()
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free


def _json(value: Any) -> str:
    return json.dumps(redacted(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
