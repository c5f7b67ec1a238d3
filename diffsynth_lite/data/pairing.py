"""This file finds the files that belong to a target: inputs of an edit, first and last frames, masks."""

from collections.abc import Callable
from pathlib import Path

from diffsynth_lite.data.folder import Folder, list_folder
from diffsynth_lite.data.images import IMAGE_SUFFIXES
from diffsynth_lite.data.records import Companions, Source, is_image, is_video, stem
from diffsynth_lite.errors import UserError


class PairFolders:
    """Folders that hold a picture for each target, of the same relative name but for the suffix.

    Args:
        source: names the folders.

    Raises:
        UserError: one cannot be read, or is the folder of the targets.
    """

    def __init__(self, source: Source) -> None:
        def opened(path: Path) -> _PairFolder:
            return _PairFolder(list_folder(path, allow_outside=source.allow_outside))

        self._inputs = [opened(path) for path in source.input_dirs]
        self._first_frame = opened(source.first_frame_dir) if source.first_frame_dir else None
        self._last_frame = opened(source.last_frame_dir) if source.last_frame_dir else None
        self._mask = opened(source.mask_dir) if source.mask_dir else None
        self._inside = tuple(_names_below(source.path, path) for path in source.pair_dirs)

    def hold(self, name: str) -> bool:
        """Whether a file of the targets' folder stands in one of the folders, and so is no target."""
        return name.startswith(self._inside)

    def of(self, target: str) -> Companions:
        """Files that belong to a target.

        Raises:
            UserError: one is missing, or there are two.
        """
        return Companions(
            inputs=tuple(folder.find(target) for folder in self._inputs),
            first_frame=self._first_frame.find(target) if self._first_frame else None,
            last_frame=self._last_frame.find(target) if self._last_frame else None,
            mask=self._mask.find(target) if self._mask else None,
        )


class _PairFolder:
    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._names: dict[str, list[str]] = {}
        for name in filter(is_image, folder.files):
            self._names.setdefault(stem(name), []).append(name)

    def find(self, target: str) -> Path:
        names = self._names.get(stem(target), [])
        if len(names) == 1:
            return self._folder.use(names[0])
        if names:
            raise UserError(f"{self._folder.path} has {' and '.join(names)}; keep one")
        raise UserError(f"{self._folder.path} has no {stem(target)}.* ({', '.join(IMAGE_SUFFIXES)})")


def _names_below(root: Path | None, folder: Path) -> str:
    """What the names of the files of ``folder`` start with, seen from ``root``; none if it is outside."""
    assert root is not None
    if folder.resolve() == root.resolve():
        raise UserError(f"{folder}: holds the targets themselves; the files that belong to them need another")
    if not folder.resolve().is_relative_to(root.resolve()):
        return "/"  # No relative name starts with it.
    return f"{folder.resolve().relative_to(root.resolve()).as_posix()}/"


def companions_in_row(
    source: Source, cell: Callable[[str], object], find: Callable[[object], tuple[str, Path]]
) -> Companions:
    """Files that a row names beside its target.

    Args:
        source: names the columns. Each must name a picture; of several input columns some may be empty.
        cell: content of the row in a column.
        find: name and path of a file.

    Raises:
        UserError: a file is missing or no picture.
    """

    def picture(column: str | None) -> Path | None:
        return _picture(column, cell(column), find) if column else None

    wanted = [(column, each) for column in source.input_columns for each in _listed(cell(column))]
    if source.input_columns and not wanted:
        raise UserError(f"no input in {' and '.join(map(repr, source.input_columns))}")
    return Companions(
        inputs=tuple(_picture(column, each, find) for column, each in wanted),
        first_frame=picture(source.first_frame_column),
        last_frame=picture(source.last_frame_column),
        mask=picture(source.mask_column),
    )


def _listed(cell: object) -> list[object]:
    if isinstance(cell, list):
        return cell
    return [] if cell is None or cell == "" else [cell]


def _picture(column: str, wanted: object, find: Callable[[object], tuple[str, Path]]) -> Path:
    try:
        _, path = find(wanted)
    except UserError as error:
        raise UserError(f"{column!r}: {error}") from None
    if not is_image(path.name):
        raise UserError(f"{column!r}: {path.name} is no picture; {', '.join(IMAGE_SUFFIXES)} are read")
    return path


def refuse_mixed_kinds(target: str, companions: Companions) -> None:
    """Refuse files that belong to the other kind of target.

    Raises:
        UserError: a clip has inputs of an edit, or a picture a first or last frame.
    """
    if is_video(target) and companions.inputs:
        raise UserError("is a clip, and only pictures have inputs; put clips and edits into two sources")
    if not is_video(target) and (companions.first_frame or companions.last_frame):
        raise UserError("is a picture, and only clips have first and last frames; make two sources of them")
