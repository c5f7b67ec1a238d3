"""This file makes the captions of an item out of what was written about it."""

import re
from collections.abc import Mapping

from diffsynth_lite.core.randomness import counter_generator
from diffsynth_lite.errors import UserError


def clean_caption(text: str) -> str:
    """``text`` without white space around it; its inner lines stay.

    Raises:
        UserError: it is empty, or text of another encoding.
    """
    caption = text.strip()
    if not caption:
        raise UserError("empty")
    if "\0" in caption or not is_unicode(caption):
        raise UserError("not UTF-8 text")
    return caption


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can spell the text; halves of surrogate pairs, as in JSON and file names, it cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def captions_in(cells: Mapping[str, object]) -> tuple[str, ...]:
    """Captions in the cells of one row: each holds a text, a list of texts, or nothing.

    Args:
        cells: column to what it holds.

    Raises:
        UserError: no column holds a text, or one holds something else.
    """
    captions: list[str] = []
    for column, cell in cells.items():
        if cell is None or (isinstance(cell, str) and not cell.strip()):
            continue
        for text in cell if isinstance(cell, list) else [cell]:
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"no text in {column!r} but {text!r}")
            captions.append(clean_caption(text))
    if not captions:
        found = ", ".join(map(repr, cells.values()))
        raise UserError(f"no text in {' and '.join(map(repr, cells))} but {found}")
    return tuple(captions)


def has_trigger(caption: str, trigger: str) -> bool:
    """Whether the words of ``trigger`` stand in the caption, whole, in small or large letters."""
    return re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption, re.IGNORECASE) is not None


def with_trigger(caption: str, trigger: str) -> str:
    """The caption with the trigger ahead, ``trigger, caption``, unless it holds it already."""
    return caption if has_trigger(caption, trigger) else f"{trigger}, {caption}"


def tag_variants(caption: str, *, count: int, separator: str, keep: int) -> tuple[str, ...]:
    """The caption as it is written, and then with its tags in other orders.

    They depend on the arguments alone, so that all runs share what a cache holds of them.

    Args:
        caption: of tags.
        count: captions to make, >= 1; there are fewer when orders that were drawn are the same.
        separator: between tags, such as ``,``; white space around tags is not theirs. It is written as it is
            given, and with a space behind it if it has none.
        keep: number of tags at the start, >= 0, that stay where they are, such as a trigger.
    """
    mark = separator.strip() or separator
    tags = [tag.strip() for tag in caption.split(mark) if tag.strip()]
    first, rest = tags[:keep], tags[keep:]
    joint = f"{separator} " if separator == separator.strip() else separator
    variants = [caption]
    for number in range(1, count):
        order = counter_generator(0, f"tag-shuffle:{caption}", number).permutation(len(rest))
        variants.append(joint.join([*first, *(rest[index] for index in order)]))
    return tuple(dict.fromkeys(variants))
