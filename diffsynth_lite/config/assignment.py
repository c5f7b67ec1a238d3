"""Walks through what was written and sets each setting of a draft, also those in lists of sections."""

from collections.abc import Callable, Iterator
from typing import TypeAlias

from diffsynth_lite.config.draft import Draft
from diffsynth_lite.config.written import Block, Entry, Written, shown

Where: TypeAlias = Callable[[int], str]
"""The file and line, or the part of the command line, that a line number stands for."""


def assign_block(draft: Draft, section: str, block: Block, where: Where) -> None:
    """Sets the settings of a known section from the entries of a block."""
    for entry in without_repeats(draft, block, where, prefix=f"{section}."):
        place = f"{where(entry.line)} {section}.{entry.key}"
        assign_setting(draft, section, entry.key, entry.value, place=place, where=where)


def assign_setting(
    draft: Draft, section: str, key: str, written: Written, *, place: str, where: Where
) -> None:
    """Sets one setting of a known section; a list of sections replaces the one that was there before."""
    field_type = draft.type_of(section, key)
    if field_type is None or not field_type.is_list_of_sections:
        draft.assign(section, key, written, place)
        return
    draft.open_list(section, key, place)
    blocks = [entry for entry in written if isinstance(entry, Block)] if isinstance(written, list) else None
    if blocks is None or blocks != written:
        draft.fail(f"{section}.{key}", f"got {shown(written)}; must be {field_type}")
        return
    for block in blocks:
        assign_block(draft, draft.add_entry(section, key, where(block.line)), block, where)


def without_repeats(draft: Draft, block: Block, where: Where, *, prefix: str) -> Iterator[Entry]:
    """The entries of a block; a key that was there before is reported instead."""
    lines: dict[str, int] = {}
    for entry in block.entries:
        if entry.key in lines:
            message = f"is there already, on line {lines[entry.key]}; keep one of them"
            draft.report(f"{where(entry.line)} {prefix}{entry.key}", message)
            continue
        lines[entry.key] = entry.line
        yield entry
