"""This file says which noise levels a run trained, and how the loss changed at each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffsynth_lite.report.series import as_number
from diffsynth_lite.run_folder.items import MeasuredItem
from diffsynth_lite.run_folder.metrics import LOSS_BY_NOISE, NOISE_TENTHS, SAMPLES_BY_NOISE

_PART = 5
"""The loss at the start is that of the first of so many parts of the rows, half-way that of the middle one,
and the loss now that of the last."""


@dataclass(frozen=True, kw_only=True)
class LossCourse:
    """How a loss went: at the start, half-way, and now; None where it was not measured.

    Attributes:
        name: of what it is the loss.
    """

    name: str
    before: float | None
    middle: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """From the start to now, relative to the start."""
        return _change(self.before, self.after)

    @property
    def late_change(self) -> float | None:
        """From half-way to now, relative to half-way: near 0 where nothing is learned any more."""
        return _change(self.middle, self.after)


@dataclass(frozen=True, kw_only=True)
class NoiseTenth(LossCourse):
    """A tenth of the noise levels, by the losses of the training: means of a fifth of the run.

    Attributes:
        name: its ends, as in 0.3-0.4.
        share: part of all samples, in [0, 1].
    """

    share: float


class NoiseLevel(LossCourse):
    """A noise level, by the losses of single items on fixed noise, which compare from step to step."""


def noise_tenths(rows: Sequence[Mapping[str, Any]]) -> list[NoiseTenth]:
    """Share of samples and losses of all tenths, the least noise first; none where nothing was logged.

    Args:
        rows: of ``metrics.jsonl``.
    """
    logged = [row for row in rows if any(f"{SAMPLES_BY_NOISE}{name}" in row for name in NOISE_TENTHS)]
    counts = {name: sum(samples for _, samples in _samples(logged, name)) for name in NOISE_TENTHS}
    total = sum(counts.values())
    if not total:
        return []
    part = max(1, len(logged) // _PART)
    middle = (len(logged) - part) // 2
    return [
        NoiseTenth(
            name=name,
            share=counts[name] / total,
            before=_mean_loss(logged[:part], name),
            middle=_mean_loss(logged[middle : middle + part], name),
            after=_mean_loss(logged[-part:], name),
        )
        for name in NOISE_TENTHS
    ]


def noise_levels(items: Sequence[MeasuredItem], rows: Sequence[Mapping[str, Any]]) -> list[NoiseLevel]:
    """The mean loss of single items at each noise level; none before they were measured twice.

    Args:
        items: of ``items.jsonl``.
        rows: of ``item_losses.jsonl``; one that is of other items is left out.
    """
    given = items[0].noise_levels if items else []
    levels = [level for each in given if (level := as_number(each)) is not None]
    measured = [means for row in rows if (means := _means_by_level(row, len(items), len(levels)))]
    if len(measured) < 2:
        return []
    middle = measured[len(measured) // 2] if len(measured) > 2 else [None] * len(levels)
    return [
        NoiseLevel(name=f"{level:.2g}", before=before, middle=half_way, after=after)
        for level, before, half_way, after in zip(levels, measured[0], middle, measured[-1], strict=True)
    ]


def _means_by_level(row: Mapping[str, Any], num_items: int, num_levels: int) -> list[float] | None:
    """The mean over the items at each level; None where the row has not all of them."""
    by_item = row.get("by_level")
    if not isinstance(by_item, list) or len(by_item) != num_items:
        return None
    found = [[as_number(loss) for loss in own] for own in by_item if isinstance(own, list)]
    losses = [own for own in found if len(own) == num_levels and None not in own]
    if len(losses) < num_items:
        return None
    return [sum(filter(None, at_level)) / num_items for at_level in zip(*losses, strict=True)]


def _change(before: float | None, after: float | None) -> float | None:
    return after / before - 1 if before and after is not None else None


def _samples(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Mean loss and number of the samples of each row that has some."""
    pairs = [
        (as_number(row.get(f"{LOSS_BY_NOISE}{name}")), as_number(row.get(f"{SAMPLES_BY_NOISE}{name}")))
        for row in rows
    ]
    return [(loss, samples) for loss, samples in pairs if loss is not None and samples and samples > 0]


def _mean_loss(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    pairs = _samples(rows, name)
    total = sum(samples for _, samples in pairs)
    return sum(loss * samples for loss, samples in pairs) / total if total else None
