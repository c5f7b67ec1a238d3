"""This file says which training items a run learned from and which got worse: their losses on fixed noise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from diffsynth_lite.report.series import as_number
from diffsynth_lite.run_folder.items import MeasuredItem

_MAX_SHOWN = 200
_SPARKLINE_POINTS = 40


@dataclass(frozen=True, kw_only=True)
class ItemLoss:
    """A training item and how its loss changed.

    Attributes:
        before: its first loss.
        after: its last one.
        losses: all of them in order, those in between thinned.
    """

    item: MeasuredItem
    before: float
    after: float
    losses: Sequence[float]

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
        shown: items whose loss fell least, or rose, come first.
        num_measured: of the shown ones and those that are left out, which lie between the best and the worst.
        num_better: items whose loss fell.
        median_change: of all that were measured.
    """

    first_step: int
    last_step: int
    shown: Sequence[ItemLoss]
    num_measured: int
    num_better: int
    median_change: float


def read_teaching(items: Sequence[MeasuredItem], rows: Sequence[Mapping[str, Any]]) -> Teaching | None:
    """How the losses of items changed; None before they were measured twice.

    Args:
        items: of ``items.jsonl``.
        rows: of ``item_losses.jsonl``; one that is of other items is left out.
    """
    measured = [
        (int(step), [as_number(loss) for loss in losses])
        for row in rows
        if isinstance(losses := row.get("losses"), list)
        and len(losses) == len(items)
        and (step := as_number(row.get("step"))) is not None
    ]
    if len(measured) < 2:
        return None
    found = []
    for place, item in enumerate(items):
        losses = [loss for _, row in measured if (loss := row[place]) is not None]
        if len(losses) > 1:
            stride = -(-len(losses) // _SPARKLINE_POINTS)
            thinned = [*losses[:-1:stride], losses[-1]]
            found.append(ItemLoss(item=item, before=losses[0], after=losses[-1], losses=thinned))
    if not found:
        return None
    found.sort(key=lambda each: each.change, reverse=True)
    half = _MAX_SHOWN // 2
    return Teaching(
        first_step=measured[0][0],
        last_step=measured[-1][0],
        shown=found if len(found) <= _MAX_SHOWN else [*found[:half], *found[-half:]],
        num_measured=len(found),
        num_better=sum(each.change < 0 for each in found),
        median_change=median(each.change for each in found),
    )
