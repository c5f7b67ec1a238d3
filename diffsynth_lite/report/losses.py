"""This file compares the losses of a run: by noise level, by item on fixed noise, and by item as trained on.

A loss as trained on depends first on the noise level. So each is divided by the median of those that had
about the same level in about the same part of the run: 1 is the expected value, and hard items are above it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.charts import NO_TABLE, Column, Table, as_number
from diffsynth_lite.run_folder.metrics import LOSS_BY_NOISE, NOISE_TENTHS, SAMPLES_BY_NOISE, MeasuredItem

_PARTS = 5
"""Number of parts of a run: the first loss is that of the first part, the loss half-way that of the middle
one, and the loss now that of the last one. Hard items are compared within each part, as losses fall."""
_NEIGHBOURS = 1 / 40
"""Part of the samples on each side of a sample in its window of noise levels."""
_MIN_NEIGHBOURS = 5
_MEDIANS = 200
"""Number of medians in each part, evenly spread, with linear interpolation between them."""
_MIN_SAMPLES = 4
"""Fewest samples of an item that can count as hard."""
_MAX_HARD = 20
_MAX_ITEMS = 200
_MAX_POINTS = 40
"""Points of the line that shows the course of a loss."""

_LEVEL = Column(title="level", kind="name")
_COURSE = (
    Column(title="first loss", kind="number"),
    Column(title="half-way", kind="number", is_wide=True),
    Column(title="now", kind="number"),
    Column(title="change", kind="change"),
    Column(title="since half-way", kind="change"),
)

_Array = npt.NDArray[np.float64]


def noise_tenths(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Share of samples and mean losses of each tenth of the noise levels, the least noise first.

    Args:
        rows: of ``metrics.jsonl``.
    """
    logged = [row for row in rows if any(f"{SAMPLES_BY_NOISE}{name}" in row for name in NOISE_TENTHS)]
    counts = {name: sum(samples for _, samples in _samples_at(logged, name)) for name in NOISE_TENTHS}
    total = sum(counts.values())
    if not total:
        return NO_TABLE
    part = max(1, len(logged) // _PARTS)
    middle = (len(logged) - part) // 2
    parts = (logged[:part], logged[middle : middle + part], logged[-part:])
    return Table(
        columns=(_LEVEL, Column(title="share", kind="share"), *_COURSE),
        rows=[
            (name, counts[name] / total, *_course(*(_mean_loss(rows, name) for rows in parts)))
            for name in NOISE_TENTHS
        ],
    )


def noise_levels(items: Sequence[MeasuredItem], rows: Sequence[Mapping[str, Any]]) -> Table:
    """The mean loss of single items on fixed noise at each noise level; empty before two measurements.

    Args:
        rows: of ``item_losses.jsonl``; one that is of other items is left out.
    """
    levels = _levels(items)
    measured = [means for row in rows if (means := _means_by_level(row, len(items), len(levels)))]
    if len(measured) < 2:
        return NO_TABLE
    middle = measured[len(measured) // 2] if len(measured) > 2 else [None] * len(levels)
    courses = zip(levels, measured[0], middle, measured[-1], strict=True)
    return Table(
        columns=(_LEVEL, *_COURSE), rows=[(f"{level:.2g}", *_course(*losses)) for level, *losses in courses]
    )


def _course(before: float | None, middle: float | None, after: float | None) -> tuple[float | None, ...]:
    """The course of a loss, and its changes since the start and since half-way."""
    return before, middle, after, _change(before, after), _change(middle, after)


def _change(before: float | None, after: float | None) -> float | None:
    return after / before - 1 if before and after is not None else None


def _levels(items: Sequence[MeasuredItem]) -> list[float]:
    given = items[0].noise_levels if items else []
    return [level for each in given if (level := as_number(each)) is not None]


def _means_by_level(row: Mapping[str, Any], num_items: int, num_levels: int) -> list[float] | None:
    """The mean over the items at each level; None where the row has not all of them."""
    by_item = _list(row.get("by_level"))
    found = [[as_number(loss) for loss in own] for own in by_item if isinstance(own, list)]
    losses = [own for own in found if len(own) == num_levels and None not in own]
    if not losses or not num_items == len(by_item) == len(losses):
        return None
    return [sum(filter(None, at_level)) / num_items for at_level in zip(*losses, strict=True)]


def _samples_at(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Mean loss and number of the samples of each row that has some in a tenth."""
    pairs = [
        (as_number(row.get(f"{LOSS_BY_NOISE}{name}")), as_number(row.get(f"{SAMPLES_BY_NOISE}{name}")))
        for row in rows
    ]
    return [(loss, samples) for loss, samples in pairs if loss is not None and samples and samples > 0]


def _mean_loss(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    pairs = _samples_at(rows, name)
    total = sum(samples for _, samples in pairs)
    return sum(loss * samples for loss, samples in pairs) / total if total else None


@dataclass(frozen=True, kw_only=True)
class ItemLoss:
    """A training item and how its loss on fixed noise changed.

    Attributes:
        losses: in order, thinned between the first and the last.
        by_level: the last loss at each of the item's noise levels; empty if these were not stored.
    """

    item: MeasuredItem
    before: float
    after: float
    losses: Sequence[float]
    by_level: Sequence[float | None]

    @property
    def change(self) -> float:
        """Relative change of the loss; negative if it fell."""
        return self.after / self.before - 1 if self.before else 0.0

    @property
    def thumbnail(self) -> str | None:
        """A small image of the item as a data URL."""
        url = self.item.thumbnail
        return url if isinstance(url, str) and url.startswith("data:image/") else None


@dataclass(frozen=True, kw_only=True)
class ItemProgress:
    """Losses of single items on fixed noise.

    Attributes:
        noise_levels: of the losses by level; empty if these were not stored.
        shown: the items with the highest and the lowest losses, the highest first.
        num_measured: number of all measured items, shown or left out.
        median: of the last losses of all measured items.
        median_change: of all measured items.
    """

    first_step: int
    last_step: int
    noise_levels: Sequence[float]
    shown: Sequence[ItemLoss]
    num_measured: int
    num_better: int
    median: float
    median_change: float


def item_progress(items: Sequence[MeasuredItem], rows: Sequence[Mapping[str, Any]]) -> ItemProgress | None:
    """How the losses of items changed; None before they were measured twice.

    Args:
        rows: of ``item_losses.jsonl``; one that is of other items is left out.
    """
    measured = [
        row
        for row in rows
        if len(_list(row.get("losses"))) == len(items) and as_number(row.get("step")) is not None
    ]
    found = [each for place, item in enumerate(items) if (each := _item_loss(item, place, measured))]
    if not found:
        return None
    found.sort(key=lambda each: each.after, reverse=True)
    half = _MAX_ITEMS // 2
    return ItemProgress(
        first_step=int(measured[0]["step"]),
        last_step=int(measured[-1]["step"]),
        noise_levels=_levels(items) if any(each.by_level for each in found) else (),
        shown=found if len(found) <= _MAX_ITEMS else [*found[:half], *found[-half:]],
        num_measured=len(found),
        num_better=sum(each.change < 0 for each in found),
        median=median(each.after for each in found),
        median_change=median(each.change for each in found),
    )


def _item_loss(item: MeasuredItem, place: int, rows: Sequence[Mapping[str, Any]]) -> ItemLoss | None:
    """How the loss of the item at a place changed; None where fewer than two are known."""
    known = [(loss, row) for row in rows if (loss := as_number(row["losses"][place])) is not None]
    if len(known) < 2:
        return None
    losses = [loss for loss, _ in known]
    after, last = known[-1]
    stride = -(-len(losses) // _MAX_POINTS)
    by_level = _list(last.get("by_level"))
    return ItemLoss(
        item=item,
        before=losses[0],
        after=after,
        losses=[*losses[:-1:stride], after],
        by_level=[as_number(level) for level in _list(by_level[place] if place < len(by_level) else None)],
    )


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def hard_items(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The items whose losses are highest for their noise levels; empty before two have enough samples.

    The hardest come first, by the ratio to the expected loss minus two standard errors. The columns are this
    ratio, the standard error of its mean (from the scatter of single samples), and the number of samples.

    Args:
        rows: of ``sample_losses.jsonl``, in the order of the steps.
    """
    names, levels, losses = _samples(rows)
    if len(losses) <= _PARTS * _MIN_NEIGHBOURS:
        return NO_TABLE
    parts = [slice(each[0], each[-1] + 1) for each in np.array_split(np.arange(len(losses)), _PARTS)]
    ratios = np.concatenate([losses[part] / _expected(levels[part], losses[part]) for part in parts])
    by_item: dict[str, list[float]] = defaultdict(list)
    for name, ratio in zip(names, ratios.tolist(), strict=True):
        by_item[name].append(ratio)
    scatter = float(ratios.std())
    found = [
        (redacted(name), sum(own) / len(own), scatter / len(own) ** 0.5, len(own))
        for name, own in by_item.items()
        if len(own) >= _MIN_SAMPLES
    ]
    if len(found) < 2:
        return NO_TABLE
    found.sort(key=lambda row: row[1] - 2 * row[2], reverse=True)
    return Table(
        columns=(
            Column(title="item"),
            Column(title="loss", kind="ratio"),
            Column(title="give or take", kind="ratio"),
            Column(title="samples", kind="count", is_wide=True),
        ),
        rows=found[:_MAX_HARD],
        summary=f"{len(found)} items with four samples and more; {len(losses)} samples.",
    )


def _samples(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], _Array, _Array]:
    """Item, noise level and loss of each sample; anything else in the rows is left out."""
    held = [row["samples"] for row in rows if isinstance(row.get("samples"), dict)]
    given = [(name, _list(each)) for samples in held for name, own in samples.items() for each in _list(own)]
    found = [
        (name, level, loss)
        for name, sample in given
        if len(sample) == 2
        and (level := as_number(sample[0])) is not None
        and (loss := as_number(sample[1])) is not None
        and loss > 0
    ]
    values = np.array([(level, loss) for _, level, loss in found], dtype=np.float64).reshape(-1, 2)
    return [name for name, _, _ in found], values[:, 0], values[:, 1]


def _expected(levels: _Array, losses: _Array) -> _Array:
    """For each sample, the median loss of those whose noise levels are next to its own."""
    order = np.argsort(levels, kind="stable")
    by_level = losses[order]
    reach = max(_MIN_NEIGHBOURS, round(len(levels) * _NEIGHBOURS))
    places = np.linspace(0, len(levels) - 1, min(len(levels), _MEDIANS)).round().astype(int)
    medians = [np.median(by_level[max(place - reach, 0) : place + reach + 1]) for place in places]
    expected = np.empty_like(losses)
    expected[order] = np.interp(np.arange(len(levels)), places, medians)
    return expected
