"""This file lists the files of a folder once, and finds those that rows and names ask for.

Nothing outside the folder is reached unless that is allowed: links are resolved, other files are not.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from diffsynth_lite.data.captions import is_unicode
from diffsynth_lite.data.file_errors import is_regular_file
from diffsynth_lite.data.listing import listed
from diffsynth_lite.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """The files below a folder.

    Attributes:
        path: of the folder.
        files: relative name with forward slashes, in order, to the reason why the file cannot be used, or "".
        allow_outside: whether files outside may be asked for.
    """

    path: Path
    files: Mapping[str, str]
    allow_outside: bool

    def use(self, name: str) -> Path:
        """Path of a file of the folder.

        Raises:
            UserError: it cannot be used.
        """
        if problem := self.files[name]:
            raise UserError(f"{name} {problem}")
        return self.path / name

    def find(self, wanted: object) -> tuple[str, Path]:
        """Name and path of the file that a row asks for.

        Raises:
            UserError: it is not there, cannot be used, or is not for rows to ask for.
        """
        if isinstance(wanted, str) and wanted in self.files:
            return wanted, self.use(wanted)
        if not isinstance(wanted, str) or not wanted.strip():
            raise UserError(f"{wanted!r} is not the name of a file")
        if "://" in wanted:
            raise UserError(f"{wanted!r} is a URL, and none is fetched")
        if "\0" in wanted or "\\" in wanted or PureWindowsPath(wanted).drive:
            raise UserError(f"{wanted!r} must be a path with forward slashes, without drive and zero bytes")
        path = PurePosixPath(wanted)
        if str(path) in self.files:
            return str(path), self.use(str(path))
        if not path.is_absolute() and ".." not in path.parts:
            raise UserError(f"{wanted!r} is not among the files of {self.path}; hidden ones are not read")
        if not self.allow_outside:
            raise UserError(f"{wanted!r} must be relative to {self.path} and inside it, or set allow_outside")
        if not is_regular_file(self.path / path):
            raise UserError(f"{wanted!r}: no such file")
        return str(path), self.path / path


def list_folder(path: Path, *, allow_outside: bool) -> Folder:
    """All files below ``path`` that are not hidden and in no hidden folder.

    Folders that are links are read only if ``allow_outside``, and never those that lead to a place that is
    read anyway.

    Raises:
        UserError: ``path`` or a folder below is not a folder that can be read.
    """
    if not path.exists():
        raise UserError(f"{path}: no such folder")
    if not path.is_dir():
        raise UserError(f"{path}: is a file; give the folder")
    root = os.path.realpath(path)
    files: dict[str, str] = {}
    linked: list[str] = []
    try:
        for name, entry in _walk(path, [root], linked, follow=allow_outside):
            shown = name if name.isascii() else name.encode(errors="backslashreplace").decode()
            files[shown] = _problem(name, entry, root=root, allow_outside=allow_outside)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if linked:
        remedy = "they lead to what is read already" if allow_outside else "set allow_outside to read them"
        names = listed(sorted(linked))
        logger.warning("%s: %d linked folders are not read, %s: %s", path, len(linked), remedy, names)
    return Folder(path=path, files=dict(sorted(files.items())), allow_outside=allow_outside)


def _walk(
    path: Path, read: list[str], linked: list[str], *, follow: bool
) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Name and entry of each file; ``read`` gathers the places walked, ``linked`` the links left out."""
    folders = [("", str(path))]
    while folders:
        prefix, folder = folders.pop()
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in visible:
            name = prefix + entry.name
            if not _is_folder(entry):
                yield name, entry
            elif entry.is_symlink() and not _is_new(entry.path, read, follow=follow):
                linked.append(name)
            else:
                folders.append((f"{name}/", entry.path))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    """Like its own method, which raises for a link that leads to itself."""
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def _is_new(link: str, read: list[str], *, follow: bool) -> bool:
    """Whether a linked folder is to be read; it is then one of those that are."""
    place = os.path.realpath(link)
    if not follow or any(_is_within(place, other) for other in read):
        return False
    read.append(place)
    return True


def _problem(name: str, entry: "os.DirEntry[str]", *, root: str, allow_outside: bool) -> str:
    """Why a file cannot be used; empty when it can."""
    if not is_unicode(name):
        return "has a name that is not UTF-8"
    if not entry.is_symlink():
        return "" if entry.is_file() else "is not a regular file"
    if not Path(entry.path).is_file():
        return "is a link to nothing"
    if not allow_outside and not _is_within(os.path.realpath(entry.path), root):
        return "is a link that leaves the folder; copy the file in, or set allow_outside"
    return ""


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
