"""This file says which training items a run learned, and which it did not: their losses on fixed noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from diffsynth_lite.report.series import as_number
from diffsynth_lite.run_folder.items import MeasuredItem

_MAX_SHOWN = 200
_MAX_POINTS = 40
"""Of the line that shows the course of a loss."""


@dataclass(frozen=True, kw_only=True)
class ItemLoss:
    """A training item and how its loss changed.

    Attributes:
        before: its first loss.
        after: its last one.
        losses: all of them in order, those in between thinned.
        by_level: the last loss at each of the item's noise levels; empty where these were not kept.
    """

    item: MeasuredItem
    before: float
    after: float
    losses: Sequence[float]
    by_level: Sequence[float | None]

    @property
    def change(self) -> float:
        """Relative to before: below 0 where the loss fell."""
        return self.after / self.before - 1 if self.before else 0.0

    @property
    def thumbnail(self) -> str | None:
        """A picture of the item as a data URL."""
        url = self.item.thumbnail
        return url if isinstance(url, str) and url.startswith("data:image/") else None


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Losses of single items on fixed noise.

    Attributes:
        first_step: of the first losses.
        last_step: of the last ones.
        noise_levels: of the losses by level; empty where these were not kept.
        shown: those with the highest losses come first, as where a loss stands tells most.
        num_measured: of the shown ones and those that are left out, which lie in the middle.
        num_better: items whose loss fell.
        median: of the last losses of all that were measured.
        median_change: likewise of the changes.
    """

    first_step: int
    last_step: int
    noise_levels: Sequence[float]
    shown: Sequence[ItemLoss]
    num_measured: int
    num_better: int
    median: float
    median_change: float


def read_teaching(items: Sequence[MeasuredItem], rows: Sequence[Mapping[str, Any]]) -> Teaching | None:
    """How the losses of items changed; None before they were measured twice.

    Args:
        items: of ``items.jsonl``.
        rows: of ``item_losses.jsonl``; one that is of other items is left out.
    """
    measured = [
        row
        for row in rows
        if len(_list(row, "losses")) == len(items) and as_number(row.get("step")) is not None
    ]
    found = [each for place, item in enumerate(items) if (each := _item_loss(item, place, measured))]
    if not found:
        return None
    found.sort(key=lambda each: each.after, reverse=True)
    half = _MAX_SHOWN // 2
    levels = items[0].noise_levels if any(each.by_level for each in found) else ()
    return Teaching(
        first_step=int(measured[0]["step"]),
        last_step=int(measured[-1]["step"]),
        noise_levels=[level for given in levels if (level := as_number(given)) is not None],
        shown=found if len(found) <= _MAX_SHOWN else [*found[:half], *found[-half:]],
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
    return ItemLoss(
        item=item,
        before=losses[0],
        after=after,
        losses=[*losses[:-1:stride], after],
        by_level=_by_level(last, place),
    )


def _by_level(row: Mapping[str, Any], place: int) -> list[float | None]:
    items = _list(row, "by_level")
    levels = items[place] if place < len(items) else None
    return [as_number(level) for level in levels] if isinstance(levels, list) else []


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    return value if isinstance(value, list) else []
