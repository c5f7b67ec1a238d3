"""This file writes and opens a sealed cache: all data that a run reads, in three parts that never change.

``entries.lance`` holds the tensors, ``items.table`` the items and the keys of all entries, and ``SEALED``
everything that does not grow with their number: the identity of the data, and the place of each column in the
table. ``SEALED`` is written last, and its second line is the sha256 of its first: a seal is complete or does
not exist.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.cache import TensorCache, parse_entry
from diffsynth_lite.data.captions import TagCounts
from diffsynth_lite.data.item_table import KEY_BYTES, Column, ItemColumns, ItemTable
from diffsynth_lite.data.items import DataIdentity, UsableData
from diffsynth_lite.data.sealed.entries import EntryShard, SealedEntries, SealFolder, write_entries
from diffsynth_lite.data.sealed.mapped import MappedColumn, MappedFile, append_hashes
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import signed_line

SEAL_NAME = "SEALED"
TABLE_NAME = "items.table"
ENTRIES_NAME = "entries.lance"
_REMEDY = "restore it from a copy, or seal again into another folder"


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedItems:
    """A data set in ``SEALED``; but for ``columns`` see :class:`ItemTable`.

    Attributes:
        group_counts: bucket, source and number of items of each group.
        columns: start and length in bytes of each column in the table.
        tag_counts: by the index of a source.
    """

    buckets: tuple[Bucket, ...]
    has_unconditional: bool
    group_counts: tuple[tuple[int, int, int], ...]
    facts: dict[str, int | str]
    columns: dict[str, tuple[int, int]]
    identity: DataIdentity
    tag_counts: dict[int, TagCounts]


@dataclass(frozen=True, kw_only=True, slots=True)
class SealDocument:
    """The content of ``SEALED``.

    Attributes:
        schema: of all three parts.
        settings: those that the items depend on, by dotted key.
        keys: start and length in bytes of the keys of all entries in the table.
        table_bytes: content of the table.
        thumbnails: data URL of a small image by the number of a training item, for those that are shown.
    """

    schema: Literal[1]
    settings: dict[str, Any]
    data: SealedItems
    validation: SealedItems | None
    keys: tuple[int, int]
    shards: tuple[EntryShard, ...]
    table_bytes: int
    thumbnails: dict[int, str]

    @property
    def num_entries(self) -> int:
        return self.keys[1] // KEY_BYTES

    @property
    def num_bytes(self) -> int:
        """Of table and shards."""
        return self.table_bytes + sum(shard.num_bytes for shard in self.shards)

    def encode(self) -> bytes:
        """Content of the file."""
        return signed_line(_DOCUMENT.dump_json(self))


_DOCUMENT = TypeAdapter(SealDocument)


class Seal:
    """An existing sealed cache; ``digest`` is the sha256 of its ``SEALED``, in hexadecimal."""

    def __init__(self, folder: SealFolder, document: SealDocument, digest: str) -> None:
        self.folder, self.document, self.digest = folder, document, digest

    def map_table(self, copies: Path) -> MappedFile:
        """The table, in the memory that the processes of a machine share.

        Args:
            copies: folder of this machine or of several; the table of a remote seal is copied to it once.
        """
        if self.folder.is_local:
            path = Path(self.folder.location) / TABLE_NAME
        else:
            path = copies / f"{self.digest}.table"
            if not path.is_file():
                self.folder.download(TABLE_NAME, path)
        remedy = _REMEDY if self.folder.is_local else f"remove {path}, and it is copied again"
        return MappedFile(path, self.document.table_bytes, remedy=remedy)

    def dataset(self, table: MappedFile, sealed: SealedItems) -> UsableData:
        """One of its data sets, ``document.data`` or ``document.validation``."""
        items = ItemTable(
            buckets=sealed.buckets,
            has_unconditional=sealed.has_unconditional,
            group_counts={(bucket, source): count for bucket, source, count in sealed.group_counts},
            columns=ItemColumns(**{name: MappedColumn(table, *at) for name, at in sealed.columns.items()}),
            known_facts=sealed.facts,
        )
        return UsableData(items=items, identity=sealed.identity, tag_counts=sealed.tag_counts)

    def entries(self, table: MappedFile) -> SealedEntries:
        """Its entries."""
        keys = MappedColumn(table, *self.document.keys)
        return SealedEntries(self.folder.uri(ENTRIES_NAME), keys, self.document.shards)

    def problems(self, copies: Path, progress: Callable[[int, int], None]) -> Iterator[str]:
        """All damage, one line each; reads everything. For ``copies`` see :meth:`map_table`."""
        table = self.map_table(copies)
        for start, end in table.damaged_parts():
            where = self._columns_at(start, end)
            yield f"{table.path}: damaged between its bytes {start} and {end}, in {where}"
        yield from self.entries(table).problems(progress)

    def _columns_at(self, start: int, end: int) -> str:
        document = self.document
        places = {"keys of the entries": document.keys}
        places |= {f"{name} of data": at for name, at in document.data.columns.items()}
        if document.validation is not None:
            places |= {f"{name} of validation.data": at for name, at in document.validation.columns.items()}
        return ", ".join(name for name, (at, length) in places.items() if at < end and start < at + length)


def open_seal(folder: SealFolder) -> Seal | None:
    """The seal in a folder, or None where there is none."""
    content = folder.read(SEAL_NAME)
    if content is None:
        return None
    line = content.partition(b"\n")[0]
    if content != signed_line(line):
        raise UserError(
            f"data.sealed: {folder.uri(SEAL_NAME)} is damaged: its sha256 is not the one on line 2; {_REMEDY}"
        )
    try:
        document = _DOCUMENT.validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        raise UserError(
            f"data.sealed: {folder.uri(SEAL_NAME)} is not of this version of diffsynth_lite "
            f"({'.'.join(map(str, problem['loc']))}: {problem['msg']}); seal again into another folder"
        ) from None
    # Checked now, so that no run fails at the first row of a missing shard.
    written = [TABLE_NAME, *(f"{ENTRIES_NAME}/data/{shard.file}" for shard in document.shards)]
    there = set(folder.names())
    if missing := [name for name in written if name not in there]:
        raise UserError(
            f"data.sealed: {folder} lacks {len(missing)} of its {len(written)} files, such as {missing[0]}; "
            f"{_REMEDY}"
        )
    return Seal(folder, document, hashlib.sha256(line).hexdigest()[:32])


_COPIED_AT_ONCE = 16 * 2**20
_MAX_NAMED = 3


def write_seal(
    folder: SealFolder,
    cache: TensorCache,
    progress: Callable[[int, int], None],
    *,
    data: UsableData,
    validation: UsableData | None = None,
    settings: Mapping[str, Any],
    more_keys: Iterable[str] = (),
    texts: Mapping[str, str] = MappingProxyType({}),
    thumbnails: Mapping[int, str] = MappingProxyType({}),
) -> SealDocument:
    """Write a seal; files that a killed sealing has left in the folder are removed first.

    Args:
        folder: must be empty otherwise.
        cache: source of the entries, which are checked while they are copied.
        progress: called after each entry with the number of entries written, and of all.
        settings: those that the items depend on, by dotted key.
        more_keys: of entries besides those of the items.
        texts: key to the text of a caption.
        thumbnails: see :class:`SealDocument`.
    """
    _clear(folder)
    datasets = [each for each in (data, validation) if each is not None]
    keys = _sorted_keys([each.items for each in datasets], more_keys)
    done = 0

    def entry(key: str) -> bytes:
        nonlocal done
        done += 1
        progress(done, len(keys) // KEY_BYTES)
        return _entry(cache, key)

    shards = write_entries(folder.uri(ENTRIES_NAME), keys, texts, entry)
    with tempfile.TemporaryDirectory(dir=cache.folder) as scratch:
        table = Path(scratch) / TABLE_NAME
        with table.open("wb") as file:
            sealed = [_write_items(file, each) for each in datasets]
            keys_at = _write_column(file, keys)
        table_bytes = append_hashes(table)
        folder.upload(table, TABLE_NAME)
        document = SealDocument(
            schema=1,
            settings=dict(settings),
            data=sealed[0],
            validation=sealed[1] if validation is not None else None,
            keys=keys_at,
            shards=tuple(shards),
            table_bytes=table_bytes,
            thumbnails=dict(thumbnails),
        )
        folder.sync()
        last = Path(scratch) / SEAL_NAME
        last.write_bytes(document.encode())
        folder.upload(last, SEAL_NAME)
        folder.sync()
    return document


def _clear(folder: SealFolder) -> None:
    """Remove the files of a killed sealing; refuse to work in a folder that holds something else."""
    names = folder.names()
    ours = [name for name in names if name == TABLE_NAME or name.startswith(f"{ENTRIES_NAME}/")]
    if others := sorted({*names} - {*ours}):
        raise UserError(
            f"data.sealed: {folder} holds {', '.join(others[:_MAX_NAMED])} and is not a sealed cache; name "
            "an empty or a new folder"
        )
    folder.delete(ours)
    folder.make()


def _sorted_keys(tables: Iterable[ItemTable], more: Iterable[str]) -> bytes:
    """Each key once, ascending."""
    columns = [
        column for table in tables for column in (table.columns.media_keys, table.columns.caption_keys)
    ]
    together = b"".join([*(column[:] for column in columns), *map(bytes.fromhex, more)])
    return np.unique(np.frombuffer(together, f"S{KEY_BYTES}")).tobytes()


def _entry(cache: TensorCache, key: str) -> bytes:
    path = cache.path(key)
    try:
        content = path.read_bytes()
        parse_entry(key, content)
    except FileNotFoundError:
        raise UserError(f"data.cache_dir: {path} is not there; fill the cache, then seal it") from None
    except ValueError as error:
        raise UserError(
            f"data.cache_dir: {path} is damaged: {error}; `diffsynth-lite cache verify` sets it aside, and "
            "`cache fill` makes it again"
        ) from None
    return content


def _write_items(file: BinaryIO, data: UsableData) -> SealedItems:
    table = data.items
    return SealedItems(
        buckets=table.buckets,
        has_unconditional=table.has_unconditional,
        group_counts=tuple((*group, count) for group, count in table.group_counts.items()),
        facts=dict(table.facts()),
        columns={name: _write_column(file, column) for name, column in table.columns.by_name().items()},
        identity=data.identity,
        tag_counts=dict(data.tag_counts),
    )


def _write_column(file: BinaryIO, column: Column) -> tuple[int, int]:
    """Write a column; returns its start and length in bytes."""
    start = file.tell()
    for place in range(0, len(column), _COPIED_AT_ONCE):
        file.write(column[place : place + _COPIED_AT_ONCE])
    return start, len(column)
