"""This file finds pictures that look alike, so that nobody trains on one of them many times unawares.

Source of the hash: difference hash, N. Krawetz, "Kind of Like That" (2013).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

_GRID = 8
_BAND_BITS = 16
_MAX_COMPARED = 200
"""Most candidates that one picture is compared with: of a hundred thousand on white all share a band."""
MAX_DIFFERENT_BITS = 3
"""Fewer than the bands of a hash, so that two hashes this close agree in at least one band."""
MAX_COLOUR_DIFFERENCE = 6.0
"""Mean difference of two thumbnails, of 255; drawings in other colours have equal difference hashes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What a picture looks like, in 200 bytes.

    Attributes:
        bits: difference hash of 64 bits.
        thumbnail: (8, 8, 3), 8 bits.
    """

    bits: int
    thumbnail: npt.NDArray[np.uint8]


def look_of(picture: Image.Image) -> Look:
    """The look of an RGB picture of any size."""
    grey = picture.convert("L").resize((_GRID + 1, _GRID), Image.Resampling.BOX)
    rises = np.diff(np.asarray(grey, dtype=np.int16), axis=1) > 0
    bits = int.from_bytes(np.packbits(rises).tobytes(), "big")
    return Look(bits=bits, thumbnail=np.asarray(picture.resize((_GRID, _GRID), Image.Resampling.BOX)))


def look_alikes(looks: Mapping[str, Look]) -> list[list[str]]:
    """Groups of names whose pictures look alike, in the order of ``looks``.

    Two pictures are in one group when a chain of near ones connects them.
    """
    names = list(looks)
    group_of = {name: name for name in names}

    def root(name: str) -> str:
        while group_of[name] != name:
            group_of[name] = group_of[group_of[name]]
            name = group_of[name]
        return name

    for name, other in _pairs(looks):
        if root(name) != root(other) and _near(looks[name], looks[other]):
            group_of[root(name)] = root(other)
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[root(name)].append(name)
    return [group for group in groups.values() if len(group) > 1]


def equal_files(contents: Mapping[str, str]) -> list[list[str]]:
    """Groups of names with the same content, from the hash of each."""
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, content in contents.items():
        names_of[content].append(name)
    return [names for names in names_of.values() if len(names) > 1]


def _pairs(looks: Mapping[str, Look]) -> Iterator[tuple[str, str]]:
    """Pairs of names that share a band of 16 bits of their hash."""
    bands: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, look in looks.items():
        for shift in range(0, _GRID * _GRID, _BAND_BITS):
            bands[shift, look.bits >> shift & (1 << _BAND_BITS) - 1].append(name)
    for names in bands.values():
        for place, name in enumerate(names):
            yield from ((name, other) for other in names[max(0, place - _MAX_COMPARED) : place])


def _near(one: Look, other: Look) -> bool:
    if (one.bits ^ other.bits).bit_count() > MAX_DIFFERENT_BITS:
        return False
    difference = np.abs(one.thumbnail.astype(np.int16) - other.thumbnail)
    return float(difference.mean()) <= MAX_COLOUR_DIFFERENCE
