"""This file finds the step to recommend, what cannot be distinguished from it, and what speaks against each.

The prompts are a sample of all that a LoRA may be asked for, so intervals are those of Student's t over
prompts, at 95 % for all columns together (Bonferroni). Steps share prompts and seeds, so their differences
are taken by prompt. ``docs/methods.md`` has what was measured of it.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from diffsynth_lite.scores.record import BASE_STEP, ScoredColumn, ScoreRecord

FEWEST_PROMPTS = 8
"""Of each kind, for a recommendation: with 8, intervals cover what they promise, and distinguish little."""
CONFIDENCE = 0.95

_ROUNDING = 1e-6
"""Differences of features in float32 that mean nothing."""
_SMALLEST_ROOM = 0.01
"""Between the contrast of the base and of held-out images: with less the base makes such images itself."""

Mark = Literal["from memory", "drifted", "not shown to be better than the base"]
Reason = Literal["too few prompts", "no saved step", "not shown to be better than the base"]
_NOT_BETTER: Literal["not shown to be better than the base"] = "not shown to be better than the base"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over prompts, and where the mean over all such prompts is; without ends for a single prompt."""

    value: float
    low: float | None
    high: float | None

    @property
    def is_above_zero(self) -> bool:
        """Whether 0 is shown to be too low."""
        return self.low is not None and self.low > _ROUNDING

    @property
    def is_below_zero(self) -> bool:
        """Whether 0 is shown to be too high."""
        return self.high is not None and self.high < -_ROUNDING


@dataclass(frozen=True, kw_only=True)
class JudgedColumn:
    """What the scores of a LoRA mean.

    Attributes:
        column: its name in the record.
        step: None of a LoRA that is not of the run.
        new: what it has learned, N: 0 is the base, 1 the held-out images.
        kept: what it left as it was, K: 1 is the base, 0 as far from it as another prompt.
        prompt: similarity of images to new prompts, less that of the base.
        total: Z, the mean of N and K.
        marks: what a person should know before taking it. From memory: training images are met more closely
            than held-out ones. Drifted: images of plain prompts differ more from those of the base than
            those of another seed do.
    """

    column: str
    step: int | None
    new: Interval
    kept: Interval
    prompt: Interval
    total: Interval
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The best of the saved columns.

    Attributes:
        best: None where nothing is recommended.
        same: the other columns that are not shown to be worse than it.
        reason: why nothing is recommended.
        columns: all but the base, saved or not, in the order of the record.
    """

    best: JudgedColumn | None
    same: tuple[JudgedColumn, ...]
    reason: Reason | None
    columns: tuple[JudgedColumn, ...]


def recommend(record: ScoreRecord, saved: Collection[int] | None = None) -> Recommendation:
    """The recommendation of a record.

    Args:
        saved: the steps that can be taken; None for all. LoRAs that are not of the run always can.
    """
    parts = [_Parts(column, record) for column in record.columns if column.step != BASE_STEP]
    judged = tuple(_judge(part, len(parts)) for part in parts)
    candidates = [
        (one, part)
        for one, part in zip(judged, parts, strict=True)
        if saved is None or one.step is None or one.step in saved
    ]
    if min(len(record.new_prompts), len(record.plain_prompts)) < FEWEST_PROMPTS:
        return Recommendation(best=None, same=(), reason="too few prompts", columns=judged)
    if not candidates:
        return Recommendation(best=None, same=(), reason="no saved step", columns=judged)
    best, best_part = max(candidates, key=lambda pair: pair[0].total.value)
    if not best.new.is_above_zero:
        return Recommendation(best=None, same=(), reason=_NOT_BETTER, columns=judged)
    pairs = len(candidates) * (len(candidates) - 1) // 2  # the best is chosen by the same scores
    same = tuple(
        one
        for one, part in candidates
        if one is not best
        and not sum_of_means(
            [a - b for a, b in zip(part.of_total, best_part.of_total, strict=True)], comparisons=pairs
        ).is_below_zero
    )
    return Recommendation(best=best, same=same, reason=None, columns=judged)


def parts_of_total(record: ScoreRecord, step: int) -> Sequence[np.ndarray]:
    """The samples, by prompt, whose means add up to Z of a step; none where it is not scored."""
    return next((_Parts(one, record).of_total for one in record.columns if one.step == step), ())


def sum_of_means(samples: Sequence[np.ndarray], *, comparisons: int = 1) -> Interval:
    """The interval of a sum of means over prompts, each of prompts of its own.

    The degrees of freedom are those of Welch and Satterthwaite.

    Args:
        samples: arrays (P,) of values by prompt, independent of each other.
        comparisons: how many intervals are read together.
    """
    value = float(sum(sample.mean() for sample in samples))
    if min(map(len, samples)) < 2:
        return Interval(value=value, low=None, high=None)
    squares = [sample.var(ddof=1) / len(sample) for sample in samples]
    total = sum(squares)
    if total == 0.0:
        return Interval(value=value, low=value, high=value)
    degrees = total**2 / sum(s**2 / (len(a) - 1) for s, a in zip(squares, samples, strict=True))
    from scipy.special import stdtrit  # only here: a page without scores does not wait for it

    half = float(stdtrit(degrees, 1 - (1 - CONFIDENCE) / 2 / comparisons)) * math.sqrt(total)
    return Interval(value=value, low=value - half, high=value + half)


class _Parts:
    """The values by prompt that a column is judged by."""

    def __init__(self, column: ScoredColumn, record: ScoreRecord) -> None:
        base = record.base
        room = record.held_out_contrast - float(np.mean(base.contrast))
        self.column = column
        self.new = (np.array(column.contrast) - np.array(base.contrast)) / max(room, _SMALLEST_ROOM)
        self.kept = np.array(column.kept)
        self.of_total = self.new / 2, self.kept / 2
        self.prompt = np.array(column.prompt) - np.array(base.prompt)
        self.left_of_new = _distance_left(column.likeness, base.likeness)
        self.left_of_taught = _distance_left(column.memory, base.memory)
        self.moved = np.array(record.other_seed) - self.kept if record.other_seed else None


def _distance_left(likeness: Sequence[float], of_base: Sequence[float]) -> np.ndarray:
    """How far images are from their references, (P,): 1 is the mean distance of those of the base."""
    return (1 - np.array(likeness)) / max(1 - float(np.mean(of_base or 0.0)), _ROUNDING)


def _judge(part: _Parts, count: int) -> JudgedColumn:
    """What one of so many columns, which are read together, means."""
    new = sum_of_means([part.new], comparisons=count)
    marks: list[Mark] = []
    if len(part.left_of_taught) and sum_of_means([part.left_of_new, -part.left_of_taught]).is_above_zero:
        marks.append("from memory")
    if part.moved is not None and sum_of_means([part.moved], comparisons=count).is_above_zero:
        marks.append("drifted")
    if not new.is_above_zero:
        marks.append(_NOT_BETTER)
    return JudgedColumn(
        column=part.column.column,
        step=part.column.step,
        new=new,
        kept=sum_of_means([part.kept], comparisons=count),
        prompt=sum_of_means([part.prompt], comparisons=count),
        total=sum_of_means(part.of_total, comparisons=count),
        marks=tuple(marks),
    )
