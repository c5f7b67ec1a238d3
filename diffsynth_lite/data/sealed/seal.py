"""This file is a sealed cache: what a run needs of its data, in three parts that are never changed.

``entries.lance`` holds the tensors, ``items.table`` the items and the keys of all entries, and ``SEALED`` all
that does not grow with their number: what the data are, and where in the table each column is. ``SEALED`` is
written last, and its second line is the sha256 of its first: a seal is there whole or not at all.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.captions import TagCounts
from diffsynth_lite.data.item_table import KEY_BYTES, ItemColumns, ItemTable
from diffsynth_lite.data.items import DataIdentity
from diffsynth_lite.data.sealed.entries import EntryShard, SealedEntries
from diffsynth_lite.data.sealed.folder import SealFolder
from diffsynth_lite.data.sealed.mapped_file import MappedColumn, MappedFile
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import signed_line

SEAL_NAME = "SEALED"
TABLE_NAME = "items.table"
ENTRIES_NAME = "entries.lance"
_REMEDY = "restore it from a copy, or seal again into another folder"


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedItems:
    """What ``SEALED`` says of a data set; but for ``columns`` see :class:`ItemTable`.

    Attributes:
        group_counts: bucket, source and number of items of each group.
        columns: start and length in bytes of each column in the table.
        identity: what the items hold.
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
    """What ``SEALED`` says.

    Attributes:
        schema: of all three parts.
        settings: those that the items depend on, by dotted key.
        data: what is trained on.
        validation: what is held out; None where nothing is.
        keys: start and length in bytes of the keys of all entries in the table.
        shards: files of the entries.
        table_bytes: content of the table.
        thumbnails: data URL of a small picture by the number of a training item, for those that are shown.
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
    """A sealed cache that is there.

    Args:
        folder: holds it.
        document: what its ``SEALED`` says.
        digest: of that, in hexadecimal.
    """

    def __init__(self, folder: SealFolder, document: SealDocument, digest: str) -> None:
        self.folder, self.document, self.digest = folder, document, digest

    def map_table(self, copies: Path) -> MappedFile:
        """The table, in the memory that the processes of a machine share.

        Args:
            copies: folder of this machine or of several; the table of a seal elsewhere is copied to it once.

        Raises:
            DamagedSealError: it is not what was written.
            UserError: it cannot be copied.
        """
        if self.folder.is_local:
            path = Path(self.folder.location) / TABLE_NAME
        else:
            path = copies / f"{self.digest}.table"
            if not path.is_file():
                self.folder.download(TABLE_NAME, path)
        remedy = _REMEDY if self.folder.is_local else f"remove {path}, and it is copied again"
        return MappedFile(path, self.document.table_bytes, remedy=remedy)

    def items(self, table: MappedFile, sealed: SealedItems) -> ItemTable:
        """One of its data sets, ``document.data`` or ``document.validation``."""
        return ItemTable(
            buckets=sealed.buckets,
            has_unconditional=sealed.has_unconditional,
            group_counts={(bucket, source): count for bucket, source, count in sealed.group_counts},
            columns=ItemColumns(**{name: MappedColumn(table, *at) for name, at in sealed.columns.items()}),
            known_facts=sealed.facts,
        )

    def entries(self, table: MappedFile) -> SealedEntries:
        """Its entries."""
        keys = MappedColumn(table, *self.document.keys)
        return SealedEntries(self.folder.uri(ENTRIES_NAME), keys, self.document.shards)

    def problems(self, copies: Path, progress: Callable[[int, int], None]) -> Iterator[str]:
        """What of it is damaged, one line each; reads everything.

        Args:
            copies: as for :meth:`map_table`.
            progress: called with the number of entries that were looked at, and of all.
        """
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
    """The seal in a folder, or None where there is none.

    Raises:
        UserError: it is damaged, of another version, or out of reach, or lacks files.
    """
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
    _require_files(folder, document)
    return Seal(folder, document, hashlib.sha256(line).hexdigest()[:32])


def _require_files(folder: SealFolder, document: SealDocument) -> None:
    """Check that table and shards are there, so that no run finds out at the first row of one that is not."""
    written = [TABLE_NAME, *(f"{ENTRIES_NAME}/data/{shard.file}" for shard in document.shards)]
    there = set(folder.names())
    if missing := [name for name in written if name not in there]:
        raise UserError(
            f"data.sealed: {folder} lacks {len(missing)} of its {len(written)} files, such as {missing[0]}; "
            f"{_REMEDY}"
        )
