"""This file holds the encoded items of a run, a million of them in some hundred megabytes.

Keys are stored as the 32 bytes of their 64 hexadecimal digits; values of variable length with the end of
each. Numbers are little-endian. A column is bytes, in memory or in a file that is mapped.
"""

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from diffsynth_lite.data.buckets import Bucket

KEY_BYTES = 32

Indices = npt.NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemRow:
    """One item of training, and the cache entries with its tensors.

    Attributes:
        source: index of its source.
        media_key: cache entry of its latents, 64 hexadecimal digits.
        caption_keys: entry of each of its captions, at least one.
        unconditional_key: entry of an empty caption; None where captions are never dropped.
    """

    name: str
    bucket: Bucket
    source: int
    media_key: str
    caption_keys: tuple[str, ...]
    unconditional_key: str | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All entries of the item."""
        return (self.media_key, *self.caption_keys, *filter(None, [self.unconditional_key]))


class Column(Protocol):
    """Bytes that can be sliced, such as ``bytes`` themselves."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemColumns:
    """The columns of a table of N items.

    Attributes:
        bucket_index: (N,) uint16, index of each item's bucket in those of the table.
        source_index: (N,) uint16.
        members: (N,) uint32, the items by bucket, then by source, then in their order.
        names: UTF-8.
        name_ends: (N,) int64, in ``names``.
        media_keys: (N,) keys.
        caption_keys: for each item the keys of its captions, and then the unconditional key if the items have
            one.
        caption_ends: (N,) int64, counted in keys.
    """

    bucket_index: Column
    source_index: Column
    members: Column
    names: Column
    name_ends: Column
    media_keys: Column
    caption_keys: Column
    caption_ends: Column

    def by_name(self) -> dict[str, Column]:
        """The columns by name, in the order of a file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemGroup:
    """The items of one bucket and one source, at least one.

    Attributes:
        members: returns their indices, (count,), ascending.
    """

    bucket: int
    source: int
    count: int
    members: Callable[[], Indices]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemTable:
    """Items in order, in a few columns; :meth:`build` makes one.

    Attributes:
        buckets: of all items, in ascending order.
        has_unconditional: whether the items have an unconditional key; it is stored after those of the
            captions.
        group_counts: bucket and source, as indices, to the number of their items, in ascending order.
        known_facts: see :meth:`facts`, where they were computed before.
    """

    buckets: tuple[Bucket, ...]
    has_unconditional: bool
    group_counts: Mapping[tuple[int, int], int]
    columns: ItemColumns
    known_facts: Mapping[str, int | str] | None = None

    @classmethod
    def build(cls, rows: Iterable[ItemRow]) -> "ItemTable":
        """Table of ``rows``, which are read once and not kept."""
        bucket_places, source_index = array("H"), array("H")
        names, media_keys, caption_keys = bytearray(), bytearray(), bytearray()
        name_ends, caption_ends = array("q"), array("q")
        places: dict[Bucket, int] = {}  # in the order of first use
        unconditional: set[bool] = set()
        for row in rows:
            assert row.caption_keys, row.name
            bucket_places.append(places.setdefault(row.bucket, len(places)))
            source_index.append(row.source)
            names += row.name.encode()
            name_ends.append(len(names))
            media_keys += _key_bytes(row.media_key)
            unconditional.add(row.unconditional_key is not None)
            for key in row.keys[1:]:
                caption_keys += _key_bytes(key)
            caption_ends.append(len(caption_keys) // KEY_BYTES)
        assert len(unconditional) < 2, "all items have an unconditional key, or none"
        rank = {bucket: place for place, bucket in enumerate(sorted(places))}
        rank_of_place = np.array([rank[bucket] for bucket in places], np.uint16)
        bucket_index = rank_of_place[np.array(bucket_places, np.uint16)]
        source_of_item = np.array(source_index, np.uint16)
        group_of_item = bucket_index.astype(np.uint32) << 16 | source_of_item
        groups, counts = np.unique(group_of_item, return_counts=True)
        pairs = ((group >> 16, group & 0xFFFF) for group in groups.tolist())
        return cls(
            buckets=tuple(rank),
            has_unconditional=unconditional == {True},
            group_counts=dict(zip(pairs, counts.tolist(), strict=True)),
            columns=ItemColumns(
                bucket_index=bucket_index.astype("<u2").tobytes(),
                source_index=source_of_item.astype("<u2").tobytes(),
                members=np.argsort(group_of_item, kind="stable").astype("<u4").tobytes(),
                names=bytes(names),
                name_ends=np.array(name_ends, "<i8").tobytes(),
                media_keys=bytes(media_keys),
                caption_keys=bytes(caption_keys),
                caption_ends=np.array(caption_ends, "<i8").tobytes(),
            ),
        )

    def __len__(self) -> int:
        return len(self.columns.media_keys) // KEY_BYTES

    @property
    def groups(self) -> tuple[ItemGroup, ...]:
        """The items by bucket and source, in ascending order."""
        groups, start = [], 0
        for (bucket, source), count in self.group_counts.items():
            members = partial(_members, self.columns.members, start, count)
            groups.append(ItemGroup(bucket=bucket, source=source, count=count, members=members))
            start += count
        return tuple(groups)

    @property
    def items_by_bucket(self) -> dict[int, int]:
        """Index of each bucket in ``buckets`` to the number of its items."""
        return self._counts(0)

    @property
    def items_by_source(self) -> dict[int, int]:
        """Index of each source that has items to the number of its items."""
        return self._counts(1)

    def _counts(self, part: int) -> dict[int, int]:
        counts: dict[int, int] = {}
        for group, count in self.group_counts.items():
            counts[group[part]] = counts.get(group[part], 0) + count
        return counts

    def facts(self) -> Mapping[str, int | str]:
        """Equal for two tables that hold the same items in the same order, whatever their names."""
        if self.known_facts is not None:
            return self.known_facts
        columns = self.columns
        sizes = repr([self.buckets, self.has_unconditional]).encode()
        return {
            "number of items": len(self),
            "images and clips": _digest(columns.media_keys[:]),
            "captions": _digest(columns.caption_keys[:], columns.caption_ends[:]),
            "sizes": _digest(sizes, columns.bucket_index[:]),
            "sources": _digest(columns.source_index[:]),
        }

    def __iter__(self) -> Iterator[ItemRow]:
        return map(self.row, range(len(self)))

    def row(self, index: int) -> ItemRow:
        """The item at ``index``, in [0, N)."""
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        columns = self.columns
        name_start, name_end = _span(columns.name_ends, index)
        first, end = _span(columns.caption_ends, index)
        caption_keys = _keys(columns.caption_keys, first, end)
        captions_end = len(caption_keys) - self.has_unconditional
        return ItemRow(
            name=columns.names[name_start:name_end].decode(),
            bucket=self.buckets[_short(columns.bucket_index, index)],
            source=self.source(index),
            media_key=_keys(columns.media_keys, index, index + 1)[0],
            caption_keys=caption_keys[:captions_end],
            unconditional_key=caption_keys[-1] if self.has_unconditional else None,
        )

    def source(self, index: int) -> int:
        """Index of the source of the item at ``index``."""
        return _short(self.columns.source_index, index)

    def places(self, sources: Set[int]) -> Sequence[int]:
        """The items of these sources, ascending."""
        if sources >= self.items_by_source.keys():
            return range(len(self))
        index = np.frombuffer(self.columns.source_index[:], "<u2")
        return array("q", np.flatnonzero(np.isin(index, list(sources))).astype("=i8").tobytes())

    @property
    def num_bytes(self) -> int:
        """Bytes that the columns take."""
        return sum(map(len, self.columns.by_name().values()))


def _members(column: Column, start: int, count: int) -> Indices:
    return np.frombuffer(column[4 * start : 4 * (start + count)], "<u4")


def _key_bytes(key: str) -> bytes:
    packed = bytes.fromhex(key)
    assert len(packed) == KEY_BYTES, key
    return packed


def _keys(column: Column, first: int, end: int) -> tuple[str, ...]:
    digits = column[first * KEY_BYTES : end * KEY_BYTES].hex()
    return tuple(digits[start : start + 2 * KEY_BYTES] for start in range(0, len(digits), 2 * KEY_BYTES))


def _span(ends: Column, index: int) -> tuple[int, int]:
    if not index:
        return 0, int.from_bytes(ends[:8], "little")
    start, end = struct.unpack("<2q", ends[8 * index - 8 : 8 * index + 8])
    return start, end


def _short(column: Column, index: int) -> int:
    return int.from_bytes(column[2 * index : 2 * index + 2], "little")


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
