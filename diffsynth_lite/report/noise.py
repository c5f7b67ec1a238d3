"""This file says which noise levels a run trained, and how the loss changed at each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffsynth_lite.report.series import as_number
from diffsynth_lite.run_folder.metrics import LOSS_BY_NOISE, NOISE_TENTHS, SAMPLES_BY_NOISE

_PART = 5
"""The loss at the start is that of the first of so many parts of the rows, the loss now that of the last."""


@dataclass(frozen=True, kw_only=True)
class NoiseTenth:
    """A tenth of the noise levels.

    Attributes:
        name: its ends, as in 0.3-0.4.
        share: part of all samples, in [0, 1].
        before: mean loss in the first fifth of the run; None without samples.
        after: in the last fifth.
    """

    name: str
    share: float
    before: float | None
    after: float | None

    @property
    def change(self) -> float | None:
        """Relative to before."""
        return self.after / self.before - 1 if self.before and self.after is not None else None


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
    return [
        NoiseTenth(
            name=name,
            share=counts[name] / total,
            before=_mean_loss(logged[:part], name),
            after=_mean_loss(logged[-part:], name),
        )
        for name in NOISE_TENTHS
    ]


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
