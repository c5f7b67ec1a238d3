"""What a person wrote: texts with their place, before anything is known about their type."""

from dataclasses import dataclass
from typing import TypeAlias

from diffsynth_lite.redaction import redacted

_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Scalar:
    """One value as typed.

    Args:
        text: the characters, without quotes.
        quoted: whether quotes (or a yaml block) said that this is text, whatever it looks like.
    """

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Entry:
    """One ``key: value`` of a block, with its line counted from 1."""

    key: str
    value: "Written"
    line: int


@dataclass(frozen=True)
class Block:
    """A yaml mapping as written: in order, with keys that occur twice still there; its line is that of the
    first of them.
    """

    entries: tuple[Entry, ...]
    line: int


Written: TypeAlias = "Scalar | Block | list[Written]"


def shown(written: Written) -> str:
    """What was written, in one short line for a message."""
    if isinstance(written, Block):
        return "a 'key: value' block"
    if isinstance(written, list):
        return shortened(f"[{', '.join(shown(item) for item in written)}]")
    if written.quoted:
        return f'"{shortened(written.text)}"'
    return f"'{shortened(written.text)}'" if written.text else "nothing"


def shortened(text: str) -> str:
    """A text on one line, of bounded length, with secrets masked: half of one would not be known as such."""
    text = redacted(text)
    line = text if text.isprintable() else repr(text)[1:-1]
    return line if len(line) <= _LONGEST_SHOWN else f"{line[:_LONGEST_SHOWN]}..."
