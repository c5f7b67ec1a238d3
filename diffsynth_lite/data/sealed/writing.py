"""This file seals a filled cache; see `seal.py` for what that leaves."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from diffsynth_lite.data.cache import TensorCache, parse_entry
from diffsynth_lite.data.item_table import KEY_BYTES, Column, ItemTable
from diffsynth_lite.data.items import UsableData
from diffsynth_lite.data.sealed.entries import write_entries
from diffsynth_lite.data.sealed.folder import SealFolder
from diffsynth_lite.data.sealed.mapped_file import CheckedWriter
from diffsynth_lite.data.sealed.seal import (
    ENTRIES_NAME,
    SEAL_NAME,
    TABLE_NAME,
    SealDocument,
    SealedItems,
)
from diffsynth_lite.errors import UserError

_COPIED_AT_ONCE = 16 * 2**20
_MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SealContent:
    """What is sealed.

    Attributes:
        settings: those that the items depend on, by dotted key.
        data: what is trained on.
        validation: what is held out; None where nothing is.
        more_keys: of entries besides those of the items.
        texts: key to the text of a caption.
        thumbnails: see :class:`SealDocument`.
    """

    settings: Mapping[str, Any]
    data: UsableData
    validation: UsableData | None
    more_keys: Sequence[str]
    texts: Mapping[str, str]
    thumbnails: Mapping[int, str]


def write_seal(
    folder: SealFolder, content: SealContent, cache: TensorCache, progress: Callable[[int, int], None]
) -> SealDocument:
    """Write a seal; what a killed one has left in the folder is removed first.

    Args:
        folder: must hold nothing else.
        content: what is sealed.
        cache: holds the entries, which are checked on the way.
        progress: called after each entry with the number of those written, and of all.

    Raises:
        UserError: the folder holds something else, or an entry is missing or damaged.
        OSError: it cannot be written.
    """
    _clear(folder)
    datasets = [each for each in (content.data, content.validation) if each is not None]
    keys = _sorted_keys([each.items for each in datasets], content.more_keys)
    done = 0

    def entry(key: str) -> bytes:
        nonlocal done
        done += 1
        progress(done, len(keys) // KEY_BYTES)
        return _entry(cache, key)

    shards = write_entries(folder.uri(ENTRIES_NAME), keys, content.texts, entry)
    with tempfile.TemporaryDirectory(dir=cache.folder) as scratch:
        table = Path(scratch) / TABLE_NAME
        with table.open("wb") as file:
            writer = CheckedWriter(file)
            sealed = [_write_items(writer, each) for each in datasets]
            keys_at = _write_column(writer, keys)
            writer.finish()
        folder.upload(table, TABLE_NAME)
        document = SealDocument(
            schema=1,
            settings=dict(content.settings),
            data=sealed[0],
            validation=sealed[1] if content.validation is not None else None,
            keys=keys_at,
            shards=tuple(shards),
            table_bytes=writer.num_bytes,
            thumbnails=dict(content.thumbnails),
        )
        folder.sync()
        last = Path(scratch) / SEAL_NAME
        last.write_bytes(document.encode())
        folder.upload(last, SEAL_NAME)
        folder.sync()
    return document


def _clear(folder: SealFolder) -> None:
    """Remove what a killed sealing has left; refuse to work in a folder that holds something else."""
    names = folder.names()
    ours = [name for name in names if name == TABLE_NAME or name.startswith(f"{ENTRIES_NAME}/")]
    if others := sorted({*names} - {*ours}):
        raise UserError(
            f"data.sealed: {folder} holds {', '.join(others[:_MAX_NAMED])} and is no sealed cache; name an "
            "empty or a new folder"
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


def _write_items(writer: CheckedWriter, data: UsableData) -> SealedItems:
    table = data.items
    return SealedItems(
        buckets=table.buckets,
        has_unconditional=table.has_unconditional,
        group_counts=tuple((*group, count) for group, count in table.group_counts.items()),
        facts=dict(table.facts()),
        columns={name: _write_column(writer, column) for name, column in table.columns.by_name().items()},
        identity=data.identity,
        tag_counts=dict(data.tag_counts),
    )


def _write_column(writer: CheckedWriter, column: Column) -> tuple[int, int]:
    """Write a column; where it starts, and its length."""
    start = writer.num_bytes
    for place in range(0, len(column), _COPIED_AT_ONCE):
        writer.write(column[place : place + _COPIED_AT_ONCE])
    return start, len(column)
