"""This file maps the table and the orders of a sealed cache into memory, which a machine's processes share.

A file is its content and then a hash of each 16 KiB of that. A part is checked when it is first read, so that
opening a file takes as long for a terabyte as for a page.
"""

import hashlib
import logging
import mmap
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from diffsynth_lite.data.cache import Pruned, delete
from diffsynth_lite.data.item_table import Indices
from diffsynth_lite.data.schedule import Numbers
from diffsynth_lite.errors import RunStoppedError
from diffsynth_lite.files import is_abandoned, is_young, replacing, sync

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

_PART_BYTES = 16 * 2**10
_HASH_BYTES = 8
_FEWEST = 2**16
"""Shorter orders are not stored, as drawing them is fast."""
_NUMBER = np.dtype("<u4")
_ORDER = re.compile(r"[0-9a-f]{32}\.order")
_TABLE = re.compile(r"([0-9a-f]{32})\.table")


class DamagedSealError(RunStoppedError):
    """A part of a sealed cache is damaged."""


def append_hashes(path: Path) -> int:
    """Append the hashes to a file with its whole content; returns the number of bytes of the content."""
    hashes = bytearray()
    with path.open("r+b") as file:
        while part := file.read(_PART_BYTES):
            hashes += xxhash.xxh3_64_digest(part)
        num_bytes = file.tell()
        file.write(hashes)
    return num_bytes


class MappedFile:
    """A file of :func:`append_hashes`, mapped into memory under a shared lock.

    A process that receives one opens the file itself.

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
            DamagedSealError: they are damaged.
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
    """Take a shared lock on a file; the map of the file keeps it for as long as it lives."""
    if sys.platform != "win32":
        with suppress(OSError):  # of a file system without locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


class MappedColumn:
    """A part of a mapped file, as a column of an item table; ``start`` and ``length`` are in bytes."""

    def __init__(self, file: MappedFile, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice, /) -> bytes:
        start, end, _ = part.indices(self._length)
        return self._file.read(self._start + start, self._start + end)


class StoredOrders:
    """Stores the random orders of a run's samples in files, so that a machine draws each once; see `Orders`.

    An order is a permutation of the samples of a pass.

    Args:
        folder: holds the files; any may be deleted when no run uses it.
        fewest: shorter ones are not stored.
    """

    def __init__(self, folder: Path, *, identity: str, fewest: int = _FEWEST) -> None:
        self._folder, self._identity, self._fewest = folder, identity, fewest

    def __call__(self, name: str, number: int, length: int, draw: Callable[[], Indices]) -> Numbers:
        """As `Orders`; a new order removes the last but one, as another process may read the last."""
        if length < self._fewest:
            return draw()
        path = self._path(name, number)
        try:
            with _locked(self._folder):
                if not path.is_file():
                    self._write(path, draw())
                    self._path(name, number - 2).unlink(missing_ok=True)
                file = MappedFile(path, length * _NUMBER.itemsize, remedy=f"remove {path}")
        except OSError as error:
            logger.warning(
                "%s: the order of %d samples cannot be kept there, so each process draws its own: %s",
                *(self._folder, length, error),
            )
            return draw()
        return _StoredNumbers(file)

    def _path(self, name: str, number: int) -> Path:
        digest = hashlib.blake2b(f"{self._identity} {name} {number}".encode(), digest_size=16)
        return self._folder / f"{digest.hexdigest()}.order"

    def _write(self, path: Path, order: Indices) -> None:
        with replacing(path) as temporary:
            order.astype(_NUMBER).tofile(temporary)
            append_hashes(temporary)
            sync(temporary)  # otherwise it may be empty after a power cut, and stop the run


class _StoredNumbers:
    def __init__(self, file: MappedFile) -> None:
        self._file = file

    def __len__(self) -> int:
        return self._file.num_bytes // _NUMBER.itemsize

    def __getitem__(self, part: slice, /) -> Indices:
        start, end, _ = part.indices(len(self))
        return np.frombuffer(self._file.read(start * _NUMBER.itemsize, end * _NUMBER.itemsize), _NUMBER)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Scope of one process of the machine: the others wait until it has drawn or deleted orders."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prune_orders(folder: Path, *, dry_run: bool) -> Pruned:
    """Delete the orders of :class:`StoredOrders` that no process has mapped and that are older than a day.

    The day is for file systems where other machines do not see locks. A run draws a missing order again.
    """
    if not folder.is_dir():
        return Pruned(num_files=0, num_bytes=0)
    with _locked(folder):
        idle = [path for path in _files(folder) if _ORDER.fullmatch(path.name) and _is_idle(path)]
        return delete([*idle, *filter(is_abandoned, _files(folder))], dry_run=dry_run)


def prune_tables(folder: Path, keep: Collection[str], *, dry_run: bool) -> Pruned:
    """Delete the copies of tables that :meth:`Seal.map_table` made, as :func:`prune_orders` does orders.

    Args:
        keep: digests of the seals whose tables stay.
    """
    tables = [(path, _TABLE.fullmatch(path.name)) for path in _files(folder)]
    idle = [path for path, name in tables if name and name[1] not in keep and _is_idle(path)]
    return delete([*idle, *filter(is_abandoned, _files(folder))], dry_run=dry_run)


def prune_unfinished(folder: Path, *, dry_run: bool) -> Pruned:
    """Delete the files that killed writers left in a folder more than a day ago."""
    return delete(filter(is_abandoned, _files(folder)), dry_run=dry_run)


def _is_idle(path: Path) -> bool:
    """Whether a file is old, and no process has mapped it, as far as locks show that."""
    if is_young(path) or sys.platform == "win32":
        return False
    try:
        with path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
