"""This file decodes items as the training will: for the contact sheet, near duplicates, blur and black bars.

Source of the hash: difference hash, N. Krawetz, "Kind of Like That" (2013).
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
from PIL.Image import Image

from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.data.media_index import FileMemory, FileState
from diffsynth_lite.data.records import ROLES, unpacked
from diffsynth_lite.doctor.findings import SheetEntry
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, evenly_spread, frame_strip
from diffsynth_lite.preparing.bars import common_bars
from diffsynth_lite.progress_log import ProgressLog

_GRID = 8
_BAND_BITS = 16
_MAX_COMPARED = 200
"""Most candidates that one image is compared with: of a hundred thousand on white all share a band."""
MAX_DIFFERENT_BITS = 3
"""Fewer than the bands of a hash, so that two hashes this close agree in at least one band."""
MAX_COLOUR_DIFFERENCE = 6.0
"""Mean difference of two thumbnails, of 255; drawings in other colours have equal difference hashes."""
_MAX_IMAGES = 3000
_MAX_FRAMES = 30_000
"""Images and frames of clips that are decoded at most: a hundred thousand photos would take an hour."""
BLURRED = 0.4
"""Least :func:`sharpness` of what is not blurred. Photos, drawings and shallow depth of field have 0.85 or
more; of photos of 512 pixels with a Gaussian blur of 3 pixels most are below, and with one of 4 all."""
_LOOK_PX = 512
"""Longer side at which blur is looked for; half of it for bars."""
_LEAST_PX = 256
_EDGE_PX = 7
_CONTRAST = 32
_LINE_STEP = 3
_MIN_EDGES = 64
_LOOK_ID = "look 2"
"""Part of the name of what is remembered; change it with `perceptual_hash`, `sharpness` and the bars."""
_BY_CONTENT = FileState(0, 0)
"""Its name holds the content of the files, so that nothing about them can change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerceptualHash:
    """What an image looks like, in 200 bytes: close hashes are of images that look alike.

    Attributes:
        bits: difference hash of 64 bits.
        thumbnail: (8, 8, 3), 8 bits.
    """

    bits: int
    thumbnail: npt.NDArray[np.uint8]


def perceptual_hash(image: Image) -> PerceptualHash:
    """The hash of an RGB image of any size."""
    grey = image.convert("L").resize((_GRID + 1, _GRID), PIL.Image.Resampling.BOX)
    rises = np.diff(np.asarray(grey, dtype=np.int16), axis=1) > 0
    bits = int.from_bytes(np.packbits(rises).tobytes(), "big")
    thumbnail = image.resize((_GRID, _GRID), PIL.Image.Resampling.BOX)
    return PerceptualHash(bits=bits, thumbnail=np.asarray(thumbnail))


def near_duplicates(hashes: Mapping[str, PerceptualHash]) -> list[list[str]]:
    """Groups of names whose images look alike, in the order of ``hashes``.

    Two images are in one group when a chain of near ones connects them.
    """
    names = list(hashes)
    group_of = {name: name for name in names}

    def root(name: str) -> str:
        while group_of[name] != name:
            group_of[name] = group_of[group_of[name]]
            name = group_of[name]
        return name

    for name, other in _pairs(hashes):
        if root(name) != root(other) and _near(hashes[name], hashes[other]):
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


def _pairs(hashes: Mapping[str, PerceptualHash]) -> Iterator[tuple[str, str]]:
    """Pairs of names that share a band of 16 bits of their hash."""
    bands: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, image in hashes.items():
        for shift in range(0, _GRID * _GRID, _BAND_BITS):
            bands[shift, image.bits >> shift & (1 << _BAND_BITS) - 1].append(name)
    for names in bands.values():
        for place, name in enumerate(names):
            yield from ((name, other) for other in names[max(0, place - _MAX_COMPARED) : place])


def _near(one: PerceptualHash, other: PerceptualHash) -> bool:
    if (one.bits ^ other.bits).bit_count() > MAX_DIFFERENT_BITS:
        return False
    difference = np.abs(one.thumbnail.astype(np.int16) - other.thumbnail)
    return float(difference.mean()) <= MAX_COLOUR_DIFFERENCE


def sharpness(image: Image) -> float:
    """How sharp the sharpest edges of an image are, in (0, 1]: 1 where a step is one pixel wide.

    It is the part of the contrast within 7 pixels, along rows and columns, that two neighbours make, of the
    sharpest hundredth of all places with contrast. So one sharp object in front of a blurred background is
    enough, and neither a plain background nor darkness counts. Where there is no contrast so close, the image
    is looked at in half its size. One that has none there, such as fog, has 1, as has one of fewer than 256
    pixels a side.

    Args:
        image: of mode "L"; with 512 pixels a side a Gaussian blur of s pixels makes about 1 / (2.5 s).
    """
    if max(image.size) < _LEAST_PX:
        return 1.0
    for side in (max(image.size), max(image.size) // 2):
        grey = np.asarray(_reduced(image, side))
        # Some of the lines are enough, and take less time.
        known = np.concatenate([_steepness(lines) for lines in (grey[::_LINE_STEP], grey.T[::_LINE_STEP])])
        if len(known) >= _MIN_EDGES:
            return round(float(np.quantile(known, 0.99)), 3)
    return 1.0


def _steepness(lines: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Of each place with contrast in lines of pixels the part of it that two neighbours make."""
    places = lines[:, : lines.shape[1] // _EDGE_PX * _EDGE_PX].reshape(-1, _EDGE_PX)
    contrast = places.max(axis=1) - places.min(axis=1)
    edges = places[contrast >= _CONTRAST].astype(np.int16)
    steps = np.abs(np.diff(edges, axis=1)).max(axis=1, initial=0)
    parts: npt.NDArray[Any] = steps / contrast[contrast >= _CONTRAST]
    return parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What is remembered of an item that was decoded.

    Attributes:
        hash: of the middle frame.
        sharpness: of the sharpest of three frames.
        bars: part of the area that is black bars, in [0, 1).
    """

    hash: PerceptualHash
    sharpness: float
    bars: float

    @classmethod
    def at(cls, frames: Sequence[Image]) -> "Look":
        """The look of a clip, or of an image, its only frame."""
        grey = [_reduced(frame.convert("L"), _LOOK_PX) for frame in evenly_spread(frames, 3)]
        small = [_reduced(frame, _LOOK_PX // 2) for frame in grey]
        left, top, right, bottom = common_bars(small) or (0, 0, *small[0].size)
        return cls(
            hash=perceptual_hash(frames[len(frames) // 2]),
            sharpness=max(map(sharpness, grey)),
            bars=round(1 - (right - left) * (bottom - top) / (small[0].width * small[0].height), 3),
        )

    @classmethod
    def parsed(cls, text: str | None) -> "Look | None":
        """That of :meth:`text`."""
        if text is None:
            return None
        bits, pixels, sharpness, bars = json.loads(text)
        thumbnail = np.frombuffer(bytes.fromhex(pixels), np.uint8).reshape(_GRID, _GRID, 3)
        return cls(hash=PerceptualHash(bits=bits, thumbnail=thumbnail), sharpness=sharpness, bars=bars)

    @property
    def text(self) -> str:
        """Json."""
        return json.dumps([self.hash.bits, self.hash.thumbnail.tobytes().hex(), self.sharpness, self.bars])

    @property
    def flaws(self) -> dict[str, str]:
        """What is wrong, by its kind: blurred, bars."""
        found = {}
        if self.sharpness < BLURRED:
            found["blurred"] = f"blurred: its sharpness is {self.sharpness:.2g}, where 1 is sharp"
        if self.bars:
            found["bars"] = f"black bars are {self.bars:.0%} of it"
        return found


def _reduced(image: Image, side: int) -> Image:
    """An image whose longer side is at most so long."""
    scale = side / max(image.size)
    if scale >= 1:
        return image
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, PIL.Image.Resampling.BILINEAR, reducing_gap=1)


@dataclass(kw_only=True)
class Decoded:
    """What decoding showed.

    Attributes:
        num_seen: that were decoded, now or earlier.
        hashes: of the middle frame of each item seen, by record.
        flaws: kind of a flaw, to name of a record, to what it is.
        bad: name of a record to the reason why it cannot be decoded.
    """

    num_items: int
    num_seen: int = 0
    hashes: dict[str, PerceptualHash] = field(default_factory=dict)
    flaws: dict[str, dict[str, str]] = field(default_factory=lambda: {"blurred": {}, "bars": {}})
    bad: dict[str, str] = field(default_factory=dict)
    entries: list[SheetEntry] = field(default_factory=list)


def decode(
    items: Sequence[TrainingItem], *, cache: TensorCache, memory: FileMemory, sheet_size: int
) -> Decoded:
    """Decode items strictly, unless that was done before, and keep some for the contact sheet.

    Args:
        items: evenly spread ones are decoded where they are too many.
        cache: names what is remembered.
        sheet_size: items on the sheet, evenly spread.
    """
    num_frames = max(1, sum(item.bucket.num_frames for item in items))
    chosen = evenly_spaced(items, min(_MAX_IMAGES, _MAX_FRAMES * len(items) // num_frames))
    decoded = Decoded(num_items=len(items), num_seen=len(chosen))
    on_sheet = {item.name for item in evenly_spaced(chosen, sheet_size)}
    progress = ProgressLog("looked at %d of %d items", len(chosen), phase="reading")
    for item in chosen:
        progress.advance()
        name = f"look {item.key(cache, _LOOK_ID)}"
        found = Look.parsed(memory.recall(name, _BY_CONTENT))
        if found is None or item.name in on_sheet:
            try:
                media = item.load()
            except UserError as error:
                decoded.bad.setdefault(item.record.name, str(error))
                continue
            found = Look.at(media.frames)
            memory.remember(name, _BY_CONTENT, found.text)
            if item.name in on_sheet:
                decoded.entries.append(_entry(item, media))
        decoded.hashes.setdefault(item.record.name, found.hash)
        for kind, flaw in found.flaws.items():
            decoded.flaws[kind].setdefault(item.record.name, flaw)
    return decoded


def evenly_spaced(items: Sequence[TrainingItem], count: int) -> Sequence[TrainingItem]:
    """At most ``count`` items, spread over all of them."""
    if len(items) <= count:
        return items
    return [items[place * len(items) // count] for place in range(count)]


def _entry(item: TrainingItem, media: Media) -> SheetEntry:
    images = _companions(media, follow_crop=False) | {"target": frame_strip(media.frames)}
    images |= _companions(media, follow_crop=True)
    return SheetEntry(
        name=item.name,
        bucket=item.bucket.name,
        captions=item.record.captions,
        images=images,
        remarks=["no audio"] if item.audio is not None and media.audio is None else [],
    )


def _companions(media: Media, *, follow_crop: bool) -> dict[str, Image]:
    """The images that belong to a target, by what they are."""
    named: dict[str, Image] = {}
    for role in (role for role in ROLES if role.follows_crop == follow_crop):
        images, label = unpacked(getattr(media, role.name)), role.setting.replace("_", " ")
        if len(images) > 1 and not role.is_several:
            images = (frame_strip(images),)
        named |= {
            f"{label} {place}" if len(images) > 1 else label: image for place, image in enumerate(images, 1)
        }
    return named
