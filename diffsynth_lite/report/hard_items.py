"""This file says which items are hard for a run: by the losses of their samples, beside those of others.

A loss depends first on the noise level. So each is divided by the median of those that had about the same
level in about the same part of the run: 1 is what is to be expected.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.series import as_number

_PARTS = 5
"""Of the run, whose samples are compared among each other: the losses fall."""
_NEIGHBOURS = 1 / 40
"""Part of these samples that lie below, and above, in the window of noise levels."""
_MIN_NEIGHBOURS = 5
_MEDIANS = 200
"""Taken in each part, evenly spread; between them the line is straight."""
_MIN_SAMPLES = 4
"""Of an item that is told of."""
_MAX_SHOWN = 20

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class HardItem:
    """How the losses of an item stand to what is to be expected.

    Attributes:
        ratio: mean of its losses, each over the expected one.
        error: standard error of that mean, by how much single samples scatter.
        num_samples: of the item that were kept.
    """

    name: str
    ratio: float
    error: float
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class HardItems:
    """The items whose losses are highest for their noise levels.

    Attributes:
        shown: the hardest first: in this order they are sure to be above the others, by two standard errors.
        num_items: that have samples enough.
        num_samples: of all items.
    """

    shown: Sequence[HardItem]
    num_items: int
    num_samples: int


def read_hard_items(rows: Sequence[Mapping[str, Any]]) -> HardItems | None:
    """The items of a run by how hard they are; None before there are two with samples enough.

    Args:
        rows: of ``sample_losses.jsonl``, in the order of the steps.
    """
    names, levels, losses = _samples(rows)
    if len(losses) <= _PARTS * _MIN_NEIGHBOURS:
        return None
    parts = [slice(each[0], each[-1] + 1) for each in np.array_split(np.arange(len(losses)), _PARTS)]
    ratios = np.concatenate([losses[part] / _expected(levels[part], losses[part]) for part in parts])
    by_item: dict[str, list[float]] = defaultdict(list)
    for name, ratio in zip(names, ratios.tolist(), strict=True):
        by_item[name].append(ratio)
    scatter = float(ratios.std())
    items = [
        HardItem(
            name=redacted(name),
            ratio=sum(own) / len(own),
            error=scatter / len(own) ** 0.5,
            num_samples=len(own),
        )
        for name, own in by_item.items()
        if len(own) >= _MIN_SAMPLES
    ]
    if len(items) < 2:
        return None
    items.sort(key=lambda item: item.ratio - 2 * item.error, reverse=True)
    return HardItems(shown=items[:_MAX_SHOWN], num_items=len(items), num_samples=len(losses))


def _samples(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], _Array, _Array]:
    """Item, noise level and loss of each sample; what is no row of samples is left out."""
    held = [row["samples"] for row in rows if isinstance(row.get("samples"), dict)]
    given = [(name, sample) for samples in held for name, own in samples.items() for sample in _list(own)]
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


def _list(value: object) -> list[list[Any]]:
    return [each for each in value if isinstance(each, list)] if isinstance(value, list) else []


def _expected(levels: _Array, losses: _Array) -> _Array:
    """For each sample, the median loss of those whose noise levels are the next ones to its own."""
    order = np.argsort(levels, kind="stable")
    by_level = losses[order]
    reach = max(_MIN_NEIGHBOURS, round(len(levels) * _NEIGHBOURS))
    places = np.linspace(0, len(levels) - 1, min(len(levels), _MEDIANS)).round().astype(int)
    medians = [np.median(by_level[max(place - reach, 0) : place + reach + 1]) for place in places]
    expected = np.empty_like(losses)
    expected[order] = np.interp(np.arange(len(levels)), places, medians)
    return expected
