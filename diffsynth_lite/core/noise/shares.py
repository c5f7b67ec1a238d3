"""This file says how much of the training each part of the noise levels gets: expected, and as it went."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_BISECTIONS = 52
_NUM_TENTHS = 10
_ADDED_AT_ONCE = 64
"""Calls whose losses wait for each other: one by one, a dozen kernels were launched for a few numbers."""
_NUM_POINTS = 1 << 14
"""Of the midpoint rule: it gives the mean of uniform draws that are shifted by 100 to 2e-8."""

Quantiles = Callable[[Tensor], Tensor]
"""Noise levels, (B,) in [0, 1], of uniform draws, (B,) in [0, 1) in float64; monotone in either direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelShares:
    """How noise levels are distributed.

    Attributes:
        tenths: ten parts that add up to 1: of the levels from 0 to 0.1, from 0.1 to 0.2, and so on.
        mean: of the levels.
    """

    tenths: Sequence[float]
    mean: float

    @property
    def below_half(self) -> float:
        """Part of the levels below 0.5."""
        return sum(self.tenths[: _NUM_TENTHS // 2])


class LossByTenth:
    """Sum of the losses, and number, of the samples in each tenth of the noise levels.

    Both stay on the device: to add some waits for nothing.
    """

    def __init__(self) -> None:
        self._totals: Tensor | None = None
        self._levels: list[Tensor] = []
        self._losses: list[Tensor] = []

    def add(self, sigma: Tensor, losses: Tensor) -> None:
        """Count samples; one whose loss is not finite is left out.

        Args:
            sigma: (B,), noise levels in [0, 1]; 1 itself belongs to the last tenth.
            losses: (B,), on the same device.
        """
        self._levels.append(sigma)
        self._losses.append(losses.detach())
        if len(self._losses) == _ADDED_AT_ONCE:
            self._add_up()

    def take(self, device: torch.device) -> Tensor:
        """(2, 10), fp32: the sums and the numbers since this was last called, on the device."""
        if self._losses:
            self._add_up()
        totals, self._totals = self._totals, None
        return torch.zeros(2, _NUM_TENTHS, device=device) if totals is None else totals

    def _add_up(self) -> None:
        sigma, losses = torch.cat(self._levels), torch.cat(self._losses).float()
        self._levels, self._losses = [], []
        tenths = torch.arange(_NUM_TENTHS, device=sigma.device)[:, None]
        counts = ((sigma * _NUM_TENTHS).long().clamp(max=_NUM_TENTHS - 1) == tenths) & losses.isfinite()
        totals = torch.stack([torch.where(counts, losses, 0.0).sum(1), counts.sum(1)])
        self._totals = totals if self._totals is None else self._totals + totals


def level_shares(levels: Quantiles) -> LevelShares:
    """The distribution of the noise levels that uniform draws get.

    A share is the length of the draws that lead there, so that the tenths are exact to the rounding of
    ``levels``; the mean is the integral over the draws.

    Args:
        levels: as training calls it.
    """
    bounds = torch.arange(1, _NUM_TENTHS, dtype=torch.float64) / _NUM_TENTHS
    lowest, highest = (0.0, 1.0) if _grows(levels) else (1.0, 0.0)
    draws = [lowest, *_draws_of_levels(levels, bounds).tolist(), highest]
    tenths = [abs(after - before) for before, after in pairwise(draws)]
    points = (torch.arange(_NUM_POINTS, dtype=torch.float64) + 0.5) / _NUM_POINTS
    return LevelShares(tenths=tenths, mean=levels(points).double().mean().item())


def mixed_shares(parts: Sequence[tuple[float, LevelShares]]) -> LevelShares:
    """The distribution over all of several parts.

    Args:
        parts: each with its weight, which is not negative; at least one is above 0.
    """
    total = sum(weight for weight, _ in parts)
    columns = zip(*(shares.tenths for _, shares in parts), strict=True)
    weights = [weight / total for weight, _ in parts]
    return LevelShares(
        tenths=[sum(w * share for w, share in zip(weights, column, strict=True)) for column in columns],
        mean=sum(w * shares.mean for w, (_, shares) in zip(weights, parts, strict=True)),
    )


def draw_of_level(levels: Quantiles, level: float) -> float:
    """The uniform draw, in [0, 1], whose noise level is ``level``, by bisection; an end where none has it."""
    return _draws_of_levels(levels, torch.tensor([level], dtype=torch.float64)).item()


def _draws_of_levels(levels: Quantiles, bounds: Tensor) -> Tensor:
    """As :func:`draw_of_level`, of (N,) levels in float64 at once."""
    grows = _grows(levels)
    low, high = torch.zeros_like(bounds), torch.ones_like(bounds)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_low = (levels(middle).double() < bounds) == grows
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return low


def _grows(levels: Quantiles) -> bool:
    first, last = levels(torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)).tolist()
    return bool(first < last)
