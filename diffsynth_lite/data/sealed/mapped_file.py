"""This file maps files into memory, where all processes of a machine share one copy, and checks what is read.

A file is its content and then a hash of each 16 KiB of that. A part is checked when it is first read, so that
to open a file takes as long for a terabyte as for a page.
"""

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import xxhash

from diffsynth_lite.errors import RunStoppedError

if sys.platform != "win32":
    import fcntl

_PART_BYTES = 16 * 2**10
_HASH_BYTES = 8


class DamagedSealError(RunStoppedError):
    """Something of a sealed cache is not as it was written."""


class CheckedWriter:
    """Writes the content of a file with its hashes.

    Args:
        file: open for writing; :meth:`finish` completes it.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unwritten = bytearray()
        self._hashes = bytearray()
        self.num_bytes = 0

    def write(self, content: bytes) -> None:
        """Add to the content."""
        self.num_bytes += len(content)
        self._unwritten += content
        whole = len(self._unwritten) // _PART_BYTES * _PART_BYTES
        if whole:
            self._take(whole)

    def finish(self) -> None:
        """Write what is left, and the hashes."""
        self._take(len(self._unwritten))
        self._file.write(self._hashes)

    def _take(self, length: int) -> None:
        content = bytes(self._unwritten[:length])
        del self._unwritten[:length]
        for start in range(0, length, _PART_BYTES):
            self._hashes += xxhash.xxh3_64_digest(content[start : start + _PART_BYTES])
        self._file.write(content)


class MappedFile:
    """A file of :class:`CheckedWriter`, mapped into memory; :func:`is_mapped` tells that it is.

    Another process opens it anew when it is sent one.

    Args:
        path: of the file.
        num_bytes: of its content.
        remedy: what to do where it is damaged.

    Raises:
        DamagedSealError: the file is not there, or not of its size.
    """

    def __init__(self, path: Path, num_bytes: int, *, remedy: str) -> None:
        self.path, self.num_bytes, self.remedy = path, num_bytes, remedy
        num_parts = -(-num_bytes // _PART_BYTES)
        self._checked = bytearray(num_parts)
        try:
            with path.open("rb") as file:
                _share(file)
                size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            raise DamagedSealError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
        if size != num_bytes + num_parts * _HASH_BYTES:
            raise DamagedSealError(
                f"{path} is damaged: it has {size} bytes, and {num_bytes + num_parts * _HASH_BYTES} were "
                f"written; {remedy}"
            )

    def __reduce__(self) -> tuple[Callable[..., "MappedFile"], tuple[Path, int]]:
        return partial(MappedFile, remedy=self.remedy), (self.path, self.num_bytes)

    def read(self, start: int, end: int) -> bytes:
        """Bytes of the content.

        Raises:
            DamagedSealError: they are not those that were written.
        """
        if start >= end:
            return b""
        for part in range(start // _PART_BYTES, -(-end // _PART_BYTES)):
            if not self._checked[part]:
                self._check(part)
        assert self._map is not None
        return self._map[start:end]

    def damaged_parts(self) -> Iterator[tuple[int, int]]:
        """Start and end of each part that is damaged; reads everything."""
        for part in range(len(self._checked)):
            try:
                self._check(part)
            except DamagedSealError:
                yield part * _PART_BYTES, min((part + 1) * _PART_BYTES, self.num_bytes)

    def _check(self, part: int) -> None:
        assert self._map is not None
        start, end = part * _PART_BYTES, min((part + 1) * _PART_BYTES, self.num_bytes)
        written_at = self.num_bytes + part * _HASH_BYTES
        if xxhash.xxh3_64_digest(self._map[start:end]) != self._map[written_at : written_at + _HASH_BYTES]:
            raise DamagedSealError(
                f"{self.path} is damaged between its bytes {start} and {end}; {self.remedy}"
            )
        self._checked[part] = True


def _share(file: BinaryIO) -> None:
    """Lock a file as one that is read, for as long as its map is there, which has the lock with it."""
    if sys.platform != "win32":
        with suppress(OSError):  # of a file system that knows no locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def is_mapped(path: Path) -> bool:
    """Whether a process has mapped a file, as far as locks tell; where there are none, it is taken to."""
    if sys.platform == "win32":
        return True
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


class MappedColumn:
    """A part of a mapped file, as a column of an item table.

    Args:
        file: holds it.
        start: of the column in the file, in bytes.
        length: of it, in bytes.
    """

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice, /) -> bytes:
        start, end, _ = part.indices(self._length)
        return self._file.read(self._start + start, self._start + end)
