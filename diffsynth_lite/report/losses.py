"""This file compares the losses of a run: by noise level, by item on fixed noise, and by item as trained on.

A loss as trained on depends first on the noise level. So each is divided by the median of those that had
about the same level in about the same part of the run: 1 is the expected value, and hard items are above it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
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
        columns=(_LEVEL, *_COURSE),
        rows=[(f"{level:.2g}", *_course(*losses)) for level, *losses in courses],
        summary="The same of the single items above, with the same noise each time: these losses compare "
        "exactly.",
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


def item_progress(items: Sequence[MeasuredItem], rows: Sequence[Mapping[str, Any]]) -> Table:
    """How the losses of items on fixed noise changed; empty before they were measured twice.

    The items with the highest and the lowest losses, the highest first: each with its thumbnail, its losses,
    the last ones at each of its noise levels, and the course of the loss.

    Args:
        rows: of ``item_losses.jsonl``; one that is of other items is left out.
    """
    measured = _measured(items, rows)
    levels = _levels(items) if any(_list(row.get("by_level")) for row in measured) else []
    found = [each for place, item in enumerate(items) if (each := _item(item, place, measured, len(levels)))]
    if not found:
        return NO_TABLE
    found.sort(key=lambda row: row[3], reverse=True)
    shown, half = found, _MAX_ITEMS // 2
    after, changes = [row[3] for row in found], [row[4] for row in found]
    summary = (
        f"From step {int(measured[0]['step'])} to step {int(measured[-1]['step'])}. Half of the items are "
        f"above {median(after):.4g} now. {sum(change < 0 for change in changes)} of {len(found)} got better, "
        f"the median by {100 * median(changes):+.1f} %."
    )
    if len(found) > _MAX_ITEMS:
        shown = [*found[:half], *found[-half:]]
        summary += f" The {_MAX_ITEMS} with the highest and the lowest losses are shown."
    return Table(
        columns=(
            Column(kind="image"),
            Column(title="item", kind="item", sort="name"),
            Column(title="at the start", kind="number", is_wide=True, sort="start"),
            Column(title="now", kind="bar", sort="now"),
            Column(title="change", kind="trend", sort="change"),
            *(Column(title=f"now at {level:.2g}", kind="number", is_wide=True) for level in levels),
            Column(title="course", kind="course", is_wide=True),
        ),
        rows=shown,
        summary=summary,
    )


def item_courses(items: Sequence[MeasuredItem], rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """The losses of each item on fixed noise, as far as they are known, the first one first."""
    measured = _measured(items, rows)
    return [[loss for loss, _ in _known(measured, place)] for place in range(len(items))]


def _measured(items: Sequence[MeasuredItem], rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that are of these items."""
    return [
        row
        for row in rows
        if len(_list(row.get("losses"))) == len(items) and as_number(row.get("step")) is not None
    ]


def _known(rows: Sequence[Mapping[str, Any]], place: int) -> list[tuple[float, Mapping[str, Any]]]:
    """The losses of the item at a place, and the rows that have them."""
    return [(loss, row) for row in rows if (loss := as_number(row["losses"][place])) is not None]


def _item(
    item: MeasuredItem, place: int, rows: Sequence[Mapping[str, Any]], num_levels: int
) -> tuple[Any, ...] | None:
    """The row of the item at a place; None where fewer than two of its losses are known."""
    known = _known(rows, place)
    if len(known) < 2:
        return None
    losses = [loss for loss, _ in known]
    before, (after, last) = losses[0], known[-1]
    by_level = _list(last.get("by_level"))
    own = [as_number(level) for level in _list(by_level[place] if place < len(by_level) else None)]
    return (
        _thumbnail(item),
        (item.name, item.size, item.caption),
        before,
        after,
        _change(before, after) or 0.0,
        *(own + [None] * num_levels)[:num_levels],
        [*losses[: -1 : -(-len(losses) // _MAX_POINTS)], after],
    )


def _thumbnail(item: MeasuredItem) -> str | None:
    """Its thumbnail, if that is a data URL of an image."""
    is_image = isinstance(item.thumbnail, str) and item.thumbnail.startswith("data:image/")
    return item.thumbnail if is_image else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def hard_items(rows: Sequence[Mapping[str, Any]], measured: Sequence[MeasuredItem] = ()) -> Table:
    """The items whose losses are highest for their noise levels; empty before two have enough samples.

    The hardest come first, by the ratio to the expected loss minus two standard errors. The columns are this
    ratio, the standard error of its mean (from the scatter of single samples), and the number of samples.

    Args:
        rows: of ``sample_losses.jsonl``, in the order of the steps.
        measured: items whose losses are measured one by one, of which there are thumbnails.
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
    thumbnails = {item.name: thumbnail for item in measured if (thumbnail := _thumbnail(item))}
    return Table(
        columns=(
            Column(kind="image"),
            Column(title="item"),
            Column(title="loss", kind="ratio"),
            Column(title="give or take", kind="ratio"),
            Column(title="samples", kind="count", is_wide=True),
        ),
        rows=[(thumbnails.get(row[0]), *row) for row in found[:_MAX_HARD]],
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
