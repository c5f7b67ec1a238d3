"""This file holds the encoded items of a run, a million of them in some hundred megabytes.

Keys are stored as the 32 bytes of their 64 hexadecimal digits; variable lengths by the end of each.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diffsynth_lite.data.buckets import Bucket

_KEY_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemRow:
    """One item, and where its tensors are: what remains of a `TrainingItem` for the training.

    Attributes:
        name: unique in the run, for messages.
        bucket: size in pixels and frames that it is trained at.
        source: index of its source.
        media_key: cache entry of its latents, 64 hexadecimal digits.
        caption_keys: entry of each of its captions, at least one.
        unconditional_key: entry that stands for no caption; None where captions are never dropped.
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ItemTable:
    """Items in order, in a few arrays; :meth:`build` makes one.

    Attributes:
        buckets: of all items, in ascending order.
        has_unconditional: whether the items have an unconditional key; it is kept after their captions.
        bucket_index: (N,), place of each item's bucket in ``buckets``.
        source_index: (N,).
    """

    buckets: tuple[Bucket, ...]
    has_unconditional: bool
    bucket_index: npt.NDArray[np.uint16]
    source_index: npt.NDArray[np.uint16]
    _names: bytes
    _name_ends: npt.NDArray[np.int64]
    _media_keys: bytes
    _caption_keys: bytes
    _caption_ends: npt.NDArray[np.int64]

    @classmethod
    def build(cls, rows: Iterable[ItemRow]) -> "ItemTable":
        """Table of ``rows``, which are read once and not kept."""
        bucket_index, source_index = array("H"), array("H")
        names, media_keys, caption_keys = bytearray(), bytearray(), bytearray()
        name_ends, caption_ends = array("q"), array("q")
        places: dict[Bucket, int] = {}  # in the order of their first rows
        unconditional: set[bool] = set()
        for row in rows:
            assert row.caption_keys, row.name
            bucket_index.append(places.setdefault(row.bucket, len(places)))
            source_index.append(row.source)
            names += row.name.encode()
            name_ends.append(len(names))
            media_keys += _key_bytes(row.media_key)
            unconditional.add(row.unconditional_key is not None)
            for key in row.keys[1:]:
                caption_keys += _key_bytes(key)
            caption_ends.append(len(caption_keys) // _KEY_BYTES)
        assert len(unconditional) < 2, "all items have an unconditional key, or none"
        rank = {bucket: place for place, bucket in enumerate(sorted(places))}
        rank_of_place = np.array([rank[bucket] for bucket in places], np.uint16)
        return cls(
            buckets=tuple(rank),
            has_unconditional=unconditional == {True},
            bucket_index=rank_of_place[np.array(bucket_index, np.uint16)],
            source_index=np.array(source_index, np.uint16),
            _names=bytes(names),
            _name_ends=np.array(name_ends, np.int64),
            _media_keys=bytes(media_keys),
            _caption_keys=bytes(caption_keys),
            _caption_ends=np.array(caption_ends, np.int64),
        )

    def __len__(self) -> int:
        return len(self.bucket_index)

    def facts(self) -> dict[str, int | str]:
        """What is equal of two tables that hold the same items in the same order, whatever their names."""
        sizes = repr([self.buckets, self.has_unconditional]).encode()
        return {
            "number of items": len(self),
            "pictures and clips": _digest(self._media_keys),
            "captions": _digest(self._caption_keys, self._caption_ends.tobytes()),
            "sizes": _digest(sizes, self.bucket_index.tobytes()),
            "sources": _digest(self.source_index.tobytes()),
        }

    def __iter__(self) -> Iterator[ItemRow]:
        return map(self.row, range(len(self)))

    def row(self, index: int) -> ItemRow:
        """The item at ``index``, in [0, N).

        Raises:
            IndexError: there is no such item.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        name_start, name_end = _span(self._name_ends, index)
        first, end = _span(self._caption_ends, index)
        captions_end = end - self.has_unconditional
        return ItemRow(
            name=self._names[name_start:name_end].decode(),
            bucket=self.buckets[self.bucket_index[index]],
            source=int(self.source_index[index]),
            media_key=_key(self._media_keys, index),
            caption_keys=tuple(_key(self._caption_keys, place) for place in range(first, captions_end)),
            unconditional_key=_key(self._caption_keys, captions_end) if self.has_unconditional else None,
        )

    @property
    def num_bytes(self) -> int:
        """Memory that the table takes."""
        columns = (self.bucket_index, self.source_index, self._name_ends, self._caption_ends)
        blobs = (self._names, self._media_keys, self._caption_keys)
        return sum(column.nbytes for column in columns) + sum(map(len, blobs))


def _key_bytes(key: str) -> bytes:
    packed = bytes.fromhex(key)
    assert len(packed) == _KEY_BYTES, key
    return packed


def _key(keys: bytes, place: int) -> str:
    return keys[place * _KEY_BYTES : (place + 1) * _KEY_BYTES].hex()


def _span(ends: npt.NDArray[np.int64], index: int) -> tuple[int, int]:
    return int(ends[index - 1]) if index else 0, int(ends[index])


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
