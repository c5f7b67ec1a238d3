"""This file formats results as tables of markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpu.results import Result


def measured(results: Sequence[Result]) -> list[Result]:
    """Those that have figures."""
    return [result for result in results if result.outcome == "measured"]


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """A table of rows of cells by column; all rows have the same columns."""
    columns = list(rows[0])
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def gibibytes(num_bytes: float | None, *, unit: float = 2**30) -> str:
    """Bytes in GiB, or in another unit, with one decimal; ``-`` where they were not measured."""
    return "-" if num_bytes is None else f"{num_bytes / unit:.1f}"


def seconds_of(values: Mapping[str, Any]) -> str:
    """The median of a step's seconds, with the shortest and the longest."""
    shortest, longest = values["spread"]
    return f"{values['seconds']:.3f} [{shortest:.3f}, {longest:.3f}]"


def percent(share: float | None) -> str:
    """A share in percent; ``-`` where there is none."""
    return "-" if share is None else f"{share:.0%}"
