"""This file makes of the rows of metrics the lines of charts: smoothed beside raw, and of bounded length."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MAX_POINTS = 1200
"""Of a line: more are not told apart on a screen."""
_SMOOTHED_OVER = 1 / 20
"""Part of the rows over which a smoothed line forgets, so that runs of any length look alike."""
_MIN_SMOOTHED_ROWS = 5
_TOO_LARGE = 1e300
"""No number of a run; json has integers that no float can hold."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart.

    Attributes:
        steps: of the points, each larger than the one before.
        values: one a step; None where what was logged is no number.
    """

    steps: Sequence[int]
    values: Sequence[float | None]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], metric: str) -> "Series":
        """What was logged under a name; the later of two rows of one step counts.

        Args:
            rows: of ``metrics.jsonl``, in any order.
        """
        by_step = {
            row["step"]: as_number(row[metric]) for row in rows if metric in row and _is_step(row.get("step"))
        }
        steps = sorted(by_step)
        return cls(steps=steps, values=[by_step[step] for step in steps])

    @property
    def points(self) -> list[tuple[int, float]]:
        """Steps and values, without those that are no numbers."""
        return [
            (step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None
        ]

    def smoothed(self) -> "Series":
        """The exponential mean of the values so far; its beginning is not drawn towards 0."""
        forgets = max(_MIN_SMOOTHED_ROWS, len(self.steps) * _SMOOTHED_OVER)
        kept = 1 - 1 / forgets
        total, weight = 0.0, 0.0
        steps, values = [], []
        for step, value in self.points:
            total, weight = kept * total + value, kept * weight + 1
            steps.append(step)
            values.append(total / weight)
        return Series(steps=steps, values=values)

    def thinned(self) -> "Series":
        """At most so many points as a screen shows, the lowest and the highest of each stretch among them."""
        if len(self.steps) <= _MAX_POINTS:
            return self
        stretch = math.ceil(2 * len(self.steps) / _MAX_POINTS)
        places = [
            place
            for start in range(0, len(self.steps), stretch)
            for place in _extremes(self.values, range(start, min(start + stretch, len(self.steps))))
        ]
        return Series(
            steps=[self.steps[place] for place in places], values=[self.values[place] for place in places]
        )

    def document(self) -> list[list[Any]]:
        """Steps and values as the page's script reads them, to six digits."""
        values = [None if value is None else float(f"{value:.6g}") for value in self.values]
        return [list(self.steps), values]


def as_number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
        return None
    return value


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _extremes(values: Sequence[float | None], places: range) -> Iterator[int]:
    """The places of the lowest and the highest value, in their order."""
    finite = [(value, place) for place in places if (value := values[place]) is not None]
    yield from sorted({min(finite)[1], max(finite)[1]} if finite else {places[0]})
