"""This file lists the files of a folder once, and finds those that rows name or that belong to a target.

Nothing outside the folder is reached unless that is allowed: links are resolved, other files are not.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from diffsynth_lite.config.files import did_you_mean
from diffsynth_lite.data.records import ROLES, Companions, Role, Source, stem
from diffsynth_lite.errors import UserError, is_of_the_machine, join_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """The files below a folder.

    Attributes:
        files: relative name with forward slashes to the reason why the file cannot be used, or ""; sorted.
        allow_outside: whether files outside may be asked for.
    """

    path: Path
    files: Mapping[str, str]
    allow_outside: bool

    def use(self, name: str) -> Path:
        """Path of a file in ``files``."""
        if problem := self.files[name]:
            raise UserError(f"{name} {problem}")
        return self.path / name

    def find(self, wanted: object) -> tuple[str, Path]:
        """Name and path of the file that a row asks for."""
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

    Folders that are links are read only if ``allow_outside``, and never those that lead to a folder that is
    read already.
    """
    if not path.exists():
        near = did_you_mean(path.name, [one.name for one in path.parent.glob("*") if one.is_dir()])
        hint = near.strip() or f"check the path (working folder: {Path.cwd()})"
        raise UserError(f"{path}: no such folder; {hint}")
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
        remedy = "they lead to folders that are read" if allow_outside else "set allow_outside to read them"
        names = join_names(sorted(linked))
        logger.warning("%s: %d linked folders are not read, %s: %s", path, len(linked), remedy, names)
    return Folder(path=path, files=dict(sorted(files.items())), allow_outside=allow_outside)


def usable_file(root: Path, name: str) -> Path | None:
    """Path of one file that :func:`list_folder` lists as usable, found without reading the folder, or None.

    Args:
        name: relative, with forward slashes; it may come from anybody.
    """
    parts = name.split("/")
    if any(not part or part.startswith(".") for part in parts) or "\0" in name or "\\" in name:
        return None
    path = root / name
    if PureWindowsPath(name).drive or not is_unicode(name) or not is_regular_file(path):
        return None
    return path if _is_within(os.path.realpath(path), os.path.realpath(root)) else None


def _walk(
    path: Path, read: list[str], linked: list[str], *, follow: bool
) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Yield name and entry of each file; folders walked join ``read``, links left out join ``linked``."""
    folders = [("", str(path))]
    while folders:
        prefix, folder = folders.pop()
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in visible:
            name = prefix + entry.name
            # The method of an entry raises for a link that leads to itself.
            is_folder = Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()
            if not is_folder:
                yield name, entry
            elif entry.is_symlink() and not _is_new(entry.path, read, follow=follow):
                linked.append(name)
            else:
                folders.append((f"{name}/", entry.path))


def _is_new(link: str, read: list[str], *, follow: bool) -> bool:
    """Whether a linked folder must be read; if so, it is added to ``read``."""
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


class PairFolders:
    """Folders that hold a file for each target, of the same relative name except for the suffix."""

    def __init__(self, source: Source) -> None:
        def opened(path: Path) -> tuple[Folder, dict[str, list[str]]]:
            folder, by_stem = list_folder(path, allow_outside=source.allow_outside), dict[str, list[str]]()
            for name in folder.files:
                by_stem.setdefault(stem(name), []).append(name)
            return folder, by_stem

        self._folders = {role: [opened(path) for path in source.dirs_of(role)] for role in ROLES}
        self._inside = tuple(_names_below(source.folder, path) for path in source.pair_dirs)

    def hold(self, name: str) -> bool:
        """Whether a file of the targets' folder is in one of these folders, and so is not a target."""
        return name.startswith(self._inside)

    def of(self, target: str) -> Companions:
        """Files that belong to a target."""

        def find(role: Role, folder: Folder, by_stem: Mapping[str, Sequence[str]]) -> Path:
            suffixes = role.suffixes(target)
            names = [name for name in by_stem.get(stem(target), ()) if name.lower().endswith(suffixes)]
            if len(names) == 1:
                return folder.use(names[0])
            if names:
                raise UserError(f"{folder.path} has {' and '.join(names)}; keep one")
            raise UserError(f"{folder.path} has no {stem(target)}.* ({', '.join(suffixes)})")

        return Companions.of(
            {role: [find(role, *each) for each in folders] for role, folders in self._folders.items()}
        )


def _names_below(root: Path | None, folder: Path) -> str:
    """Prefix of the names of the files of ``folder`` below ``root``; matches nothing if it is outside."""
    assert root is not None
    if folder.resolve() == root.resolve():
        raise UserError(f"{folder}: holds the targets themselves; the files that belong to them need another")
    if not folder.resolve().is_relative_to(root.resolve()):
        return "/"  # No relative name starts with it.
    return f"{folder.resolve().relative_to(root.resolve()).as_posix()}/"


def companions_in_row(
    source: Source,
    target: str,
    cell: Callable[[str], object],
    find: Callable[[object], tuple[str, Path]],
) -> Companions:
    """Files that a row names for its target.

    Args:
        source: its columns must name files; of several input columns some may be empty.
        cell: column to its content in the row.
        find: maps the content of a cell to name and path of the file.
    """

    def cells(role: Role, column: str) -> Sequence[object]:
        given = cell(column)
        if role.is_several and isinstance(given, list):
            return given
        return () if role.is_several and given in (None, "") else (given,)

    found = {}
    for role in ROLES:
        columns = source.columns_of(role)
        wanted = [(column, each) for column in columns for each in cells(role, column)]
        if columns and not wanted:
            raise UserError(f"no {role.setting} in {' and '.join(map(repr, columns))}")
        found[role] = [_named(column, each, find, role.suffixes(target)) for column, each in wanted]
    return Companions.of(found)


def _named(
    column: str, wanted: object, find: Callable[[object], tuple[str, Path]], suffixes: tuple[str, ...]
) -> Path:
    try:
        _, path = find(wanted)
    except UserError as error:
        raise UserError(f"{column!r}: {error}") from None
    if not path.name.lower().endswith(suffixes):
        kinds = [word for word, one in (("an image", ".png"), ("a clip", ".mp4")) if one in suffixes]
        raise UserError(
            f"{column!r}: {path.name} is not {' or '.join(kinds)}; {', '.join(suffixes)} are read"
        )
    return path


def is_regular_file(path: Path) -> bool:
    """Whether a path is an existing file; one that is too long or not permitted counts as missing.

    Raises:
        OSError: the machine failed.
    """
    try:
        return path.is_file()
    except OSError as error:
        if is_of_the_machine(error) and error.errno != errno.ENAMETOOLONG:
            raise
        return False


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode the text: not with lone surrogates, which JSON and file names may have."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)
