"""This file decodes items as the training will, to fill the contact sheet and to find near duplicates.

Source of the hash: difference hash, N. Krawetz, "Kind of Like That" (2013).
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import PIL.Image
from PIL.Image import Image

from diffsynth_lite.data import ROLES, FileMemory, FileState, TensorCache, TrainingItem, unpacked
from diffsynth_lite.doctor.findings import SheetEntry
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, frame_strip
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
_HASH_ID = "look 1"
"""Part of the name of a hash that is remembered; change it with `perceptual_hash`."""
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


@dataclass(kw_only=True)
class Decoded:
    """What decoding showed.

    Attributes:
        num_seen: that were decoded, now or earlier.
        hashes: of the middle frame of each item seen, by record.
        bad: name of a record to the reason why it cannot be decoded.
    """

    num_items: int
    num_seen: int = 0
    hashes: dict[str, PerceptualHash] = field(default_factory=dict)
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
        name = f"look {item.key(cache, _HASH_ID)}"
        found = _parsed(memory.recall(name, _BY_CONTENT))
        if found is None or item.name in on_sheet:
            try:
                media = item.load()
            except UserError as error:
                decoded.bad.setdefault(item.record.name, str(error))
                continue
            found = perceptual_hash(media.frames[len(media.frames) // 2])
            memory.remember(name, _BY_CONTENT, _text(found))
            if item.name in on_sheet:
                decoded.entries.append(_entry(item, media))
        decoded.hashes.setdefault(item.record.name, found)
    return decoded


def evenly_spaced(items: Sequence[TrainingItem], count: int) -> Sequence[TrainingItem]:
    """At most ``count`` items, spread over all of them."""
    if len(items) <= count:
        return items
    return [items[place * len(items) // count] for place in range(count)]


def _text(found: PerceptualHash) -> str:
    return json.dumps([found.bits, found.thumbnail.tobytes().hex()])


def _parsed(text: str | None) -> PerceptualHash | None:
    if text is None:
        return None
    bits, pixels = json.loads(text)
    return PerceptualHash(
        bits=bits, thumbnail=np.frombuffer(bytes.fromhex(pixels), np.uint8).reshape(8, 8, 3)
    )


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
