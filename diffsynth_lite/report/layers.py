"""This file says how much a LoRA changes each layer: as a map of the model, and by name at both ends."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from diffsynth_lite.report.series import Series, as_number

_BLOCK = re.compile(r"(.*(?:block|layer)s?\.\d+)\.(.+)")
_MAX_CELLS = 4000
"""More layers are listed by their ends only."""
_ENDS = 5
_DARKEST = 1000
"""The palest cell has at least this part less than the darkest."""


@dataclass(frozen=True, kw_only=True)
class LayerUpdate:
    """A layer and its update.

    Attributes:
        update: norm of what the LoRA adds to the weight over the norm of the weight.
        shade: in [0, 1], by the logarithm of the update; None where it is 0.
    """

    name: str
    update: float
    shade: float | None


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The update of all layers at one step.

    Attributes:
        blocks: names of the map's columns, in the order of the model.
        cells: of each kind of layer, one a block; None where that block has no such layer. Empty where there
            are too many for a map.
        largest: the layers that changed most.
        smallest: those that changed least.
        unchanged: names of those that did not change at all.
        num_layers: all there are.
        median: of the updates.
    """

    step: int
    blocks: Sequence[str]
    cells: Mapping[str, Sequence[LayerUpdate | None]]
    largest: Sequence[LayerUpdate]
    smallest: Sequence[LayerUpdate]
    unchanged: Sequence[str]
    num_layers: int
    median: float


def read_layers(rows: Sequence[Mapping[str, Any]]) -> Layers | None:
    """The updates of the latest row that has some; None where there is none, or no step was taken.

    Args:
        rows: of ``layers.jsonl``.
    """
    for row in reversed(rows):
        updates, step = _updates(row), as_number(row.get("step"))
        if updates and step:
            return _layers(int(step), updates)
    return None


def update_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Largest, median and smallest update by step, in % of the weights; layers at 0 are left out."""
    found = [
        {
            "step": row.get("step"),
            "update_largest": 100 * max(changed),
            "update_median": 100 * median(changed),
            "update_smallest": 100 * min(changed),
        }
        for row in rows
        if (changed := [update for update in _updates(row).values() if update > 0])
    ]
    names = ("update_largest", "update_median", "update_smallest")
    series = {name: Series.of(found, name).thinned() for name in names}
    return {name: each for name, each in series.items() if each.points}


def _layers(step: int, updates: Mapping[str, float]) -> Layers:
    highest = max(updates.values())
    smallest = min((update for update in updates.values() if update > 0), default=highest)
    lowest = max(smallest, highest / _DARKEST)
    layers = {
        name: LayerUpdate(name=name, update=update, shade=_shade(update, lowest, highest))
        for name, update in updates.items()
    }
    ranked = sorted(layers.values(), key=lambda layer: -layer.update)
    blocks, cells = _map(layers) if len(layers) <= _MAX_CELLS else ([], {})
    return Layers(
        step=step,
        blocks=blocks,
        cells=cells,
        largest=ranked[:_ENDS],
        smallest=ranked[: -_ENDS - 1 : -1],
        unchanged=[layer.name for layer in ranked if not layer.update],
        num_layers=len(layers),
        median=median(updates.values()),
    )


def _map(layers: Mapping[str, LayerUpdate]) -> tuple[list[str], dict[str, list[LayerUpdate | None]]]:
    """Blocks, and of each kind of layer a cell a block; layers outside of blocks share a column."""
    places = {name: match.groups() if (match := _BLOCK.fullmatch(name)) else ("", name) for name in layers}
    blocks = list(dict.fromkeys(block for block, _ in places.values()))
    columns = {block: column for column, block in enumerate(blocks)}
    cells: dict[str, list[LayerUpdate | None]] = {kind: [None] * len(blocks) for _, kind in places.values()}
    for name, (block, kind) in places.items():
        cells[kind][columns[block]] = layers[name]
    return blocks, cells


def _shade(update: float, lowest: float, highest: float) -> float | None:
    if update <= 0:
        return None
    if lowest == highest:
        return 1.0
    return max(0.0, math.log(update / lowest) / math.log(highest / lowest))


def _updates(row: Mapping[str, Any]) -> dict[str, float]:
    """Layers of a row, without those whose update is no number."""
    updates = row.get("updates")
    if not isinstance(updates, dict):
        return {}
    return {name: value for name, update in updates.items() if (value := as_number(update)) is not None}
