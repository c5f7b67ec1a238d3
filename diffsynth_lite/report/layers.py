"""This file shows how much a LoRA changes each layer: as a map, and as lists of the extremes by name."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from diffsynth_lite.report.charts import Column, Table, as_number, layer_updates

_BLOCK = re.compile(r"(.*(?:block|layer)s?\.\d+)\.(.+)")
_MAX_CELLS = 4000
"""Of more layers only the most and the least changed ones are listed."""
_ENDS = 5
_DARKEST = 1000
"""Updates smaller than the largest one by more than this factor have the palest shade."""


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
        cells: by kind of layer, one for each block; None where a block has no such layer. Empty if there are
            too many for a map.
        unchanged: names of the layers that did not change at all.
    """

    step: int
    blocks: Sequence[str]
    cells: Mapping[str, Sequence[LayerUpdate | None]]
    largest: Table
    smallest: Table
    unchanged: Sequence[str]
    num_layers: int
    median: float


def read_layers(rows: Sequence[Mapping[str, Any]]) -> Layers | None:
    """The updates of the latest row with any; None if there is none, or no step was taken.

    Args:
        rows: of ``layers.jsonl``.
    """
    for row in reversed(rows):
        updates, step = layer_updates(row), as_number(row.get("step"))
        if updates and step:
            return _layers(int(step), updates)
    return None


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
        largest=_table(ranked[:_ENDS]),
        smallest=_table(ranked[: -_ENDS - 1 : -1]),
        unchanged=[layer.name for layer in ranked if not layer.update],
        num_layers=len(layers),
        median=median(updates.values()),
    )


def _table(layers: Sequence[LayerUpdate]) -> Table:
    return Table(
        columns=(Column(), Column(kind="percent")), rows=[(layer.name, layer.update) for layer in layers]
    )


def _map(layers: Mapping[str, LayerUpdate]) -> tuple[list[str], dict[str, list[LayerUpdate | None]]]:
    """Blocks, and for each kind of layer one cell a block; layers outside of blocks share a column."""
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
