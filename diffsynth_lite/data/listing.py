"""This file names many things in one line: the first twenty, then a count."""

from collections.abc import Sequence

MAX_NAMED = 20


def listed(names: Sequence[str]) -> str:
    """``names`` joined by semicolons; those past the twentieth are only counted."""
    named = "; ".join(names[:MAX_NAMED])
    return named if len(names) <= MAX_NAMED else f"{named}; and {len(names) - MAX_NAMED} more"
