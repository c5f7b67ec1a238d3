"""This file reads and writes the folder of a sealed cache, on a disk or on object storage, through Lance."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import replacing, sync

LANCE_ERRORS = (OSError, ValueError, RuntimeError)
"""What Lance raises for a file that is gone, damaged or out of reach."""


def import_lance() -> Any:
    """The package of Lance, imported where a sealed cache is used: it takes a second or two.

    Raises:
        UserError: it is not installed.
    """
    try:
        import lance
        import lance.file
    except ImportError as error:
        raise UserError(
            f"data.sealed: needs the package pylance, which cannot be imported ({error}): "
            "pip install 'diffsynth_lite[lance]'"
        ) from None
    return lance


class SealFolder:
    """A folder by its path, or by its URI on object storage that Lance has a connector for.

    Args:
        location: the value of ``data.sealed``.
    """

    def __init__(self, location: str) -> None:
        self.is_local = "://" not in location
        self.location = str(Path(location).expanduser().absolute()) if self.is_local else location.rstrip("/")

    def __str__(self) -> str:
        return self.location

    def uri(self, name: str) -> str:
        """Where a file or dataset in it is, for Lance."""
        return f"{self.location}/{name}"

    @cached_property
    def _session(self) -> Any:
        lance = import_lance()
        try:
            return lance.file.LanceFileSession(self.location)
        except LANCE_ERRORS as error:
            raise UserError(f"data.sealed: {self} cannot be used: {first_line(error)}") from error

    def names(self) -> list[str]:
        """All files in it and below, relative to it; none where it does not exist.

        Raises:
            UserError: it cannot be reached.
        """
        if self.is_local and not Path(self.location).exists():
            return []
        session = self._session
        try:
            return sorted(session.list())
        except LANCE_ERRORS as error:
            raise UserError(f"data.sealed: {self} cannot be read: {first_line(error)}") from error

    def read(self, name: str) -> bytes | None:
        """Content of a file, or None where there is none.

        Raises:
            UserError: it cannot be reached.
        """
        if self.is_local and not Path(self.location).exists():
            return None
        session = self._session
        try:
            if not session.contains(name):
                return None
            with tempfile.TemporaryDirectory() as folder:
                copy = Path(folder) / "copy"
                session.download_file(name, str(copy))
                return copy.read_bytes()
        except LANCE_ERRORS as error:
            raise UserError(f"data.sealed: {self.uri(name)} cannot be read: {first_line(error)}") from error

    def download(self, name: str, path: Path) -> None:
        """Copy a file to ``path``, which appears whole.

        Raises:
            UserError: it cannot be read.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(path) as temporary:
                self._session.download_file(name, str(temporary))
                sync(temporary)
        except LANCE_ERRORS as error:
            raise UserError(
                f"data.sealed: {self.uri(name)} cannot be copied to {path}: {first_line(error)}"
            ) from error

    def make(self) -> None:
        """Make it, where that is done on a disk.

        Raises:
            UserError: it cannot be made.
        """
        try:
            if self.is_local:
                Path(self.location).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"data.sealed: {self} cannot be made: {error.strerror}") from error

    def upload(self, path: Path, name: str) -> None:
        """Copy a file into it.

        Raises:
            OSError: it could not be written.
        """
        self._session.upload_file(str(path), name)

    def delete(self, names: Sequence[str]) -> None:
        """Remove files.

        Raises:
            OSError: one could not be removed.
        """
        for name in names:
            self._session.delete_file(name)

    def sync(self) -> None:
        """Wait until what was written into a folder of a disk is on it."""
        if self.is_local:
            root = Path(self.location)
            for name in self.names():
                sync(root / name)
            for folder in (*(path for path in root.rglob("*") if path.is_dir()), root, root.parent):
                sync(folder)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Scope in which a panic of Lance, which is no ``Exception``, is an OSError: damaged files cause some."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a module that cannot be imported
            raise
        raise OSError(f"Lance: {error}") from error


def first_line(error: BaseException) -> str:
    """What Lance says, without the place in its own sources."""
    return str(error).splitlines()[0].partition(", /")[0] if str(error) else type(error).__name__
