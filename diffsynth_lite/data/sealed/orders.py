"""This file keeps the orders of the samples that were drawn, so that a machine draws each once.

An order is a permutation of as many numbers as there are samples in a pass. What is kept is mapped into
memory, which the processes of a machine share.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from diffsynth_lite.data.item_table import Indices
from diffsynth_lite.data.schedule import Numbers
from diffsynth_lite.data.sealed.mapped_file import CheckedWriter, MappedFile
from diffsynth_lite.files import replacing, sync

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

_FEWEST = 2**16
"""Shorter orders are drawn in a moment."""
_NUMBER = np.dtype("<u4")


class StoredOrders:
    """Gives the orders of a run's samples from files, and draws those that are in none; see `Orders`.

    Args:
        folder: holds the files; anything in it may be deleted when no run uses it.
        identity: of the items.
        fewest: shorter ones are not stored.
    """

    def __init__(self, folder: Path, *, identity: str, fewest: int = _FEWEST) -> None:
        self._folder, self._identity, self._fewest = folder, identity, fewest

    def __call__(self, name: str, number: int, length: int, draw: Callable[[], Indices]) -> Numbers:
        """As `Orders`; one that is drawn removes the last but one, as another process may read the last."""
        if length < self._fewest:
            return draw()
        path = self._path(name, number)
        try:
            with locked_orders(self._folder):
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
            with temporary.open("wb") as file:
                writer = CheckedWriter(file)
                writer.write(order.astype(_NUMBER).tobytes())
                writer.finish()
            sync(temporary)  # else an empty one may stand there after a power cut, and stop the run


@contextmanager
def locked_orders(folder: Path) -> Iterator[None]:
    """Scope of one process of the machine: the others wait for what it draws or deletes."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as file:
        if sys.platform != "win32":
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _StoredNumbers:
    def __init__(self, file: MappedFile) -> None:
        self._file = file

    def __len__(self) -> int:
        return self._file.num_bytes // _NUMBER.itemsize

    def __getitem__(self, part: slice, /) -> Indices:
        start, end, _ = part.indices(len(self))
        return np.frombuffer(self._file.read(start * _NUMBER.itemsize, end * _NUMBER.itemsize), _NUMBER)
