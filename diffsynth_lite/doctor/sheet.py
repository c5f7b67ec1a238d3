"""This file decodes items as the training will, to show them and to compare how they look."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL.Image import Image

from diffsynth_lite.data import FileMemory, FileState, TensorCache, TrainingItem
from diffsynth_lite.doctor.duplicates import Look, look_of
from diffsynth_lite.doctor.findings import SheetEntry
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.progress_log import ProgressLog
from diffsynth_lite.training.previews import frame_strip

_MAX_PICTURES = 3000
_MAX_FRAMES = 30_000
"""Pictures and frames of clips that are decoded at most: a hundred thousand photos would take an hour."""
_LOOK_ID = "look 1"
"""Name of what is remembered of an item; change it with `look_of`."""
_BY_CONTENT = FileState(0, 0)
"""Its name holds the content of the files, so that nothing about them can change."""


@dataclass(kw_only=True)
class Decoded:
    """What decoding showed.

    Attributes:
        num_items: all there are.
        num_seen: that were decoded, now or earlier.
        looks: of the middle frame of each item seen, by record.
        bad: name of a record to the reason why it cannot be decoded.
        entries: for the contact sheet.
    """

    num_items: int
    num_seen: int = 0
    looks: dict[str, Look] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    entries: list[SheetEntry] = field(default_factory=list)


def decode(
    items: Sequence[TrainingItem], *, cache: TensorCache, memory: FileMemory, sheet_size: int
) -> Decoded:
    """Decode items strictly, unless that was done before, and keep some for the contact sheet.

    Args:
        items: evenly spread ones are decoded where they are too many.
        cache: names what is remembered.
        memory: of looks.
        sheet_size: items on the sheet, evenly spread.
    """
    chosen = evenly(items, _affordable(items))
    decoded = Decoded(num_items=len(items), num_seen=len(chosen))
    on_sheet = {item.name for item in evenly(chosen, sheet_size)}
    progress = ProgressLog("looked at %d of %d items", len(chosen))
    for item in chosen:
        progress.advance()
        name = f"look {item.key(cache, _LOOK_ID)}"
        look = _parsed(memory.recall(name, _BY_CONTENT))
        if look is None or item.name in on_sheet:
            try:
                media = item.load()
            except UserError as error:
                decoded.bad.setdefault(item.record.name, str(error))
                continue
            look = look_of(media.frames[len(media.frames) // 2])
            memory.remember(name, _BY_CONTENT, _text(look))
            if item.name in on_sheet:
                decoded.entries.append(_entry(item, media))
        decoded.looks.setdefault(item.record.name, look)
    return decoded


def evenly(items: Sequence[TrainingItem], count: int) -> Sequence[TrainingItem]:
    """At most ``count`` items, spread over all of them."""
    if len(items) <= count:
        return items
    return [items[place * len(items) // count] for place in range(count)]


def _affordable(items: Sequence[TrainingItem]) -> int:
    num_frames = sum(item.bucket.num_frames for item in items)
    return min(_MAX_PICTURES, _MAX_FRAMES * len(items) // max(1, num_frames))


def _text(look: Look) -> str:
    return json.dumps([look.bits, look.thumbnail.tobytes().hex()])


def _parsed(text: str | None) -> Look | None:
    if text is None:
        return None
    bits, pixels = json.loads(text)
    return Look(bits=bits, thumbnail=np.frombuffer(bytes.fromhex(pixels), np.uint8).reshape(8, 8, 3))


def _entry(item: TrainingItem, media: Media) -> SheetEntry:
    pictures: dict[str, Image] = {
        f"input {place}" if len(media.inputs) > 1 else "input": image
        for place, image in enumerate(media.inputs, start=1)
    }
    companions = {"first frame": media.first_frame, "last frame": media.last_frame, "mask": media.mask}
    pictures["target"] = frame_strip(media.frames)
    pictures |= {name: image for name, image in companions.items() if image is not None}
    return SheetEntry(
        name=item.name, bucket=item.bucket.name, captions=item.record.captions, pictures=pictures
    )
