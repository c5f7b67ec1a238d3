"""This file stores the images and clips inside a `datasets` dataset as files, so that all else reads files.

A file is named by its content. A note next to the files lists those of a dataset, so that an unchanged
dataset is not read again. If it is stored in parts, each part has its own note.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetsError
from huggingface_hub import constants

from diffsynth_lite.data.folder import is_regular_file
from diffsynth_lite.data.metadata import Table, require_columns
from diffsynth_lite.data.records import WHOLE, Part, Source, part_index
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import replacing, write_bytes

logger = logging.getLogger(__name__)

_WHOLE = "train"
"""The default split, also for a dataset that has none."""

_ROWS_AT_ONCE = 32
"""Rows in memory while they are stored; clips can have hundreds of MiB each."""

_SIGNATURES = (
    (0, b"\x89PNG\r\n\x1a\n", ".png"),
    (0, b"\xff\xd8\xff", ".jpg"),
    (8, b"WEBP", ".webp"),
    (0, b"BM", ".bmp"),
    (0, b"GIF8", ".gif"),
    (0, b"II*\0", ".tiff"),
    (0, b"MM\0*", ".tiff"),
    (4, b"ftypavif", ".avif"),
    (4, b"ftypqt  ", ".mov"),
    (4, b"ftypM4V", ".m4v"),
    (4, b"ftyp", ".mp4"),
    (0, b"\x1a\x45\xdf\xa3", ".mkv"),
    (8, b"AVI ", ".avi"),
)
"""Offset, bytes and suffix. A .webm file is a kind of .mkv and read by the same decoder."""


def read_stored_dataset(source: Source, media_store: Path, part: Part = WHOLE) -> Table:
    """All rows of a dataset, with paths in place of media.

    Each cell of a media column is a path as text, a list of them, None, or a `UserError`; see `find_stored`.

    Args:
        part: only the media of its rows (:func:`rows_of`) are read; the cells of other rows are None.
    """
    dataset = _load(source)
    require_columns(source.where, source.columns, dataset.column_names)
    media_columns = list(dict.fromkeys((source.media_column, *source.pair_columns)))
    texts = dataset.select_columns(list(source.caption_columns)).with_format("arrow")[:]
    columns = {name: texts.column(name).to_pylist() for name in source.caption_columns}
    return Table(
        where=source.where,
        columns=columns | _stored(source, dataset.select_columns(media_columns), media_store, part),
        first_row=0,
    )


def rows_of(part: Part, num_rows: int) -> list[int]:
    """The rows of a dataset that are in a part."""
    return [row for row in range(num_rows) if part.owns(str(row))]


def find_stored(cell: object) -> tuple[str, Path]:
    """Name and path of the file in a cell of `read_stored_dataset`."""
    if isinstance(cell, UserError):
        raise cell
    if not isinstance(cell, str):
        raise UserError("no image or clip")
    return Path(cell).name, Path(cell)


def _load(source: Source) -> Dataset:
    assert source.dataset is not None
    folder = Path(source.dataset)
    is_saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    try:
        if is_saved:
            loaded = datasets.load_from_disk(source.dataset)
        else:
            loaded = datasets.load_dataset(source.dataset, split=source.split, revision=source.revision)
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{source.where} cannot be loaded: {reason}") from error
    if isinstance(loaded, DatasetDict):
        if source.split not in loaded:
            raise UserError(f"{source.where}: has no split {source.split!r}; it has {', '.join(loaded)}")
        loaded = loaded[source.split]
    elif is_saved and source.split != _WHOLE:
        raise UserError(
            f"{source.where}: is saved without splits, so there is no {source.split!r}; remove it"
        )
    if not len(loaded):
        raise UserError(f"{source.where}: no rows in the split {source.split!r}")
    return loaded


def _stored(source: Source, dataset: Dataset, media_store: Path, part: Part) -> dict[str, list[object]]:
    """Cells of the media columns, from the notes about this dataset or from its bytes."""
    for column, feature in dataset.features.items():
        element = feature
        while isinstance(element, datasets.List | datasets.LargeList):
            element = element.feature
        if not isinstance(element, datasets.Image | datasets.Video):
            raise UserError(f"{source.where}: the column {column} holds {feature}, not images or clips")
    identity = f"{dataset._fingerprint}:{sorted(dataset.column_names)}:{source.allow_outside}"
    note = media_store / "datasets" / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    if noted := _noted(note) or (_noted_by_parts(note, len(dataset)) if part.is_whole else None):
        return noted
    if part.is_whole:
        return _store(source, dataset, media_store, note)
    own, own_note = rows_of(part, len(dataset)), _note_of(part, note)
    stored = _noted(own_note) or _store(source, dataset.select(own), media_store, own_note)
    by_row = {column: dict(zip(own, cells, strict=True)) for column, cells in stored.items()}
    return {column: [cells.get(row) for row in range(len(dataset))] for column, cells in by_row.items()}


def _store(source: Source, dataset: Dataset, media_store: Path, note: Path) -> dict[str, list[object]]:
    """Cells of some rows, from their bytes, and a note about them."""
    logger.info("storing the media of %s as files in %s", source.where, media_store)
    store = _MediaStore(media_store, roots=_roots(source), allow_outside=source.allow_outside)
    stored: dict[str, list[object]] = {column: [] for column in dataset.column_names}
    for rows in dataset.with_format("arrow").iter(batch_size=_ROWS_AT_ONCE):
        for column, cells in stored.items():
            cells += [store.cell(value) for value in rows.column(column).to_pylist()]
    if not any(isinstance(leaf, UserError) for cells in stored.values() for leaf in _leaves(cells)):
        os.sync()  # Once for all files: those in the note must outlive a crash of the machine.
        note.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(note, json.dumps(stored).encode())
    return stored


def _note_of(part: Part, note: Path) -> Path:
    return note.with_suffix(f".{part.index}-of-{part.count}.json")


def _noted_by_parts(note: Path, num_rows: int) -> dict[str, list[object]] | None:
    """The cells of all rows if the notes of all parts are there; these are then merged into one note."""
    counts = {int(path.stem.rpartition("-")[2]) for path in note.parent.glob(f"{note.stem}.*-of-*.json")}
    for count in sorted(counts):
        parts = [_noted(_note_of(Part(index, count), note)) for index in range(count)]
        found = [cells for cells in parts if cells is not None]
        if len(found) < count:
            continue
        owners = [part_index(str(row), count) for row in range(num_rows)]
        columns = {column: [iter(cells[column]) for cells in found] for column in found[0]}
        noted = {column: [next(cells[owner]) for owner in owners] for column, cells in columns.items()}
        write_bytes(note, json.dumps(noted).encode())
        return noted
    return None


def _noted(note: Path) -> dict[str, list[object]] | None:
    """The cells in a note, if it is complete and all its files exist."""
    try:
        noted: dict[str, list[object]] = json.loads(note.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    files = (path for cells in noted.values() for path in _leaves(cells))
    return noted if all(Path(path).is_file() for path in files) else None


def _leaves(cells: list[object]) -> Iterator[Any]:
    """All cells that are not empty, with lists flattened."""
    for cell in cells:
        if isinstance(cell, list):
            yield from _leaves(cell)
        elif cell is not None:
            yield cell


def _roots(source: Source) -> tuple[Path, ...]:
    """Folders in which a dataset may name files: its own, and those that `datasets` downloads to."""
    own = [Path(source.dataset or "")] if Path(source.dataset or "").is_dir() else []
    return tuple(
        Path(folder).resolve() for folder in (*own, datasets.config.HF_DATASETS_CACHE, constants.HF_HUB_CACHE)
    )


class _MediaStore:
    """Files named by their content.

    Args:
        roots: folders in which a dataset may name files.
        allow_outside: whether it may name files elsewhere.
    """

    def __init__(self, folder: Path, *, roots: Sequence[Path], allow_outside: bool) -> None:
        self._folder = folder
        self._roots = roots
        self._allow_outside = allow_outside

    def cell(self, value: Any) -> object:
        """Path of the file with a cell's media, or an error."""
        if value is None:
            return None
        if isinstance(value, list):
            return [self.cell(each) for each in value]
        try:
            return self._store(value["bytes"]) if value["bytes"] else self._named(value["path"])
        except UserError as error:
            return error

    def _store(self, content: bytes) -> str:
        kinds = [suffix for start, magic, suffix in _SIGNATURES if content.startswith(magic, start)]
        if not kinds:
            raise UserError(f"begins with {content[:12]!r}, as no image or clip that is read")
        digest = hashlib.sha256(content).hexdigest()
        path = self._folder / digest[:2] / f"{digest}{kinds[0]}"
        if not path.is_file() or path.stat().st_size != len(content):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(content)
        return str(path)

    def _named(self, path: str | None) -> str:
        if not path:
            raise UserError("neither bytes nor a file")
        if "://" in path:
            raise UserError(f"{path!r} is a URL, and none is fetched")
        if "\0" in path:
            raise UserError(f"{path!r} holds zero bytes, as no file's name does")
        file = Path(os.path.realpath(path))  # `Path.resolve` raises for a link that leads to itself
        if not self._allow_outside and not any(file.is_relative_to(root) for root in self._roots):
            raise UserError(f"{path!r} is outside the dataset; set allow_outside to read it")
        if not is_regular_file(file):
            raise UserError(f"{path!r}: no such file")
        return str(Path(path).absolute())
