"""How often each noise level is trained: quantile functions from a uniform draw to sigma, and their shares.

A quantile function keeps the draw separate from its shape: the same counter-based uniform number gives the
sample's sigma under every density. The densities are those of Esser et al., "Scaling Rectified Flow
Transformers for High-Resolution Image Synthesis" (arXiv 2403.03206), section 3.1, in the form of
``diffusers.training_utils.compute_density_for_timestep_sampling``. diffusers has no ``cosmap`` density (it
draws uniformly there and only weights the loss), so that one follows the paper. ``stretched_logit_normal`` is
that of Lightricks' LTX-2 trainer (``ShiftedLogitNormalTimestepSampler`` in ``timestep_samplers.py`` of
``packages/ltx-trainer``, commit 400fd31).

Levels are shifted here rather than by a diffusers scheduler, because ``FlowMatchEulerDiscreteScheduler``
ignores its ``shift`` when ``use_dynamic_shifting`` is set. Larger images need more noise to be destroyed as
much.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Static shift ``s * sigma / (1 + (s - 1) * sigma)``; 1 changes nothing, above 1 adds noise.

    Source: arXiv 2403.03206, equation 23.

    Args:
        sigma: any shape, in [0, 1]; 0 and 1 stay where they are.
        shift: above 0.

    Returns:
        The shape and dtype of ``sigma``, in [0, 1].
    """
    if not shift > 0:
        raise ValueError(f"shift is {shift}; it must be above 0 (1 changes nothing)")
    scaled = shift * sigma
    # Written this way, the result cannot round to above 1.
    return scaled / (scaled + (1 - sigma))


def resolution_mu(
    num_tokens: int, *, base_shift: float, max_shift: float, base_tokens: int, max_tokens: int
) -> float:
    """``mu`` of the exponential shift, linear in the number of image tokens.

    The line is not cut off outside its two points. Source: ``calculate_shift`` of diffusers' pipelines.

    Args:
        base_shift: ``mu`` at ``base_tokens``.
        max_shift: ``mu`` at ``max_tokens``.
        base_tokens: tokens of the small resolution (256 in most models).
        max_tokens: tokens of the large resolution (4096 in most models), other than ``base_tokens``.
    """
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return base_shift + slope * (num_tokens - base_tokens)


TimestepDensity = Literal["uniform", "logit_normal", "stretched_logit_normal", "mode", "cosmap"]

_MARGIN = 2.0**-24
"""Distance kept from 0 and 1: the spacing of float32 just below 1."""

_LARGEST_MODE_SCALE = 2 / (math.pi - 2)
"""Beyond it, or below -1, the mode density is no longer monotone and leaves [0, 1] (section 3.1)."""

_STRETCHED_FROM, _STRETCHED_TO = -2.5758, 3.0902
"""The 0.5 % and 99.9 % percentiles of a standard normal number, as the source rounds them."""
_SMALLEST_STRETCHED = 1e-3
"""Lowest level of ``stretched_logit_normal``: those below are reflected at it."""
_UNIFORM_SHARE = 0.1
"""Of the draws of ``stretched_logit_normal``."""
_BISECTIONS = 44
"""Halvings of [0, 1]: to 6e-14, far below the spacing of float32 at the lowest level, 1e-10."""


def sigma_from_uniform(
    uniform: Tensor,
    density: TimestepDensity,
    *,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    mode_scale: float = 1.29,
    shift: float = 1.0,
) -> Tensor:
    """Noise levels with the given density, one for each uniform draw.

    Args:
        uniform: (B,), in [0, 1); computed in float64, so keep it on a device that has float64.
        density: ``uniform`` returns the draw; ``logit_normal`` is the sigmoid of a normal number;
            ``stretched_logit_normal`` moves and widens that so that its 0.5 % percentile becomes 0 and its
            99.9 % percentile 1, reflects what is then below 0.001 at that level, cuts what is above 1 to 1,
            and draws one level of ten uniformly from 0.001 to 1; ``mode`` favours the middle
            (``mode_scale > 0``) or the ends (``mode_scale < 0``); ``cosmap`` follows the cosine schedule's
            ratio of noise to signal.
        logit_mean: of the two logit-normal densities; above 0 favours noise.
        logit_std: of the same, above 0.
        mode_scale: of ``mode``, in [-1, 2 / (pi - 2)].
        shift: above 0; see :func:`shift_sigma`, by which levels are moved after
            they are drawn. A shift s moves those of ``logit_normal`` as ``log(s)`` more of ``logit_mean``
            does. In ``stretched_logit_normal`` it is that, so that what is stretched is shifted already.

    Returns:
        (B,), float32, strictly inside (0, 1).
    """
    draw = uniform.double()
    if density == "stretched_logit_normal":
        mean = logit_mean + math.log(shift)
        return _rounded(_stretched_logit_normal_quantile(draw, mean=mean, std=logit_std))
    if density == "uniform":
        sigma = draw
    elif density == "logit_normal":
        _require_positive(logit_std)
        sigma = torch.sigmoid(logit_mean + logit_std * torch.special.ndtri(draw))
    elif density == "mode":
        sigma = _mode_quantile(draw, scale=mode_scale)
    elif density == "cosmap":
        sigma = 1 - 1 / (torch.tan(math.pi / 2 * draw) + 1)
    else:
        known = ", ".join(get_args(TimestepDensity))
        raise ValueError(f"unknown timestep density {density!r}; known: {known}")
    return shift_sigma(_rounded(sigma), shift)


def _rounded(sigma: Tensor) -> Tensor:
    """In float32, strictly inside (0, 1)."""
    return sigma.float().clamp(_MARGIN, 1 - _MARGIN)


def _stretched_logit_normal_quantile(draw: Tensor, *, mean: float, std: float) -> Tensor:
    """Where the distribution function reaches the draws, by bisection: it has no closed inverse."""
    _require_positive(std)
    low, high = torch.zeros_like(draw), torch.ones_like(draw)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        is_below = _stretched_logit_normal_share(middle, mean=mean, std=std) < draw
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return high


def _stretched_logit_normal_share(level: Tensor, *, mean: float, std: float) -> Tensor:
    """Share of the levels that are at most ``level``, which is below 1: a part of them is cut to 1."""
    first, last = mean + _STRETCHED_FROM * std, mean + _STRETCHED_TO * std
    signal, noise = _sigmoid(-first), _sigmoid(first)
    # Of the two differences the one between small numbers is exact.
    width = signal - _sigmoid(-last) if mean > 0 else _sigmoid(last) - noise

    lowest = _SMALLEST_STRETCHED
    level = level.clamp(min=lowest)
    # Levels up to this one, but those that are reflected to above it.
    ends = width * torch.stack([level, 2 * lowest - level])
    odds = (noise + ends).clamp(min=0).log() - (signal - ends).clamp(min=0).log()
    up_to, reflected = torch.special.ndtr((odds - mean) / std)
    normal, uniform = up_to - reflected, (level - lowest) / (1 - lowest)
    share: Tensor = (1 - _UNIFORM_SHARE) * normal + _UNIFORM_SHARE * uniform
    return share


def _sigmoid(value: float) -> float:
    return torch.sigmoid(torch.tensor(value, dtype=torch.float64)).item()


def _require_positive(std: float) -> None:
    if not std > 0:
        raise ValueError(f"logit_std is {std}; it must be above 0")


def _mode_quantile(draw: Tensor, *, scale: float) -> Tensor:
    if not -1 <= scale <= _LARGEST_MODE_SCALE:
        raise ValueError(f"mode_scale is {scale}; it must be in [-1, {_LARGEST_MODE_SCALE:.3f}]")
    return 1 - draw - scale * (torch.cos(math.pi / 2 * draw) ** 2 - 1 + draw)


_LEVEL_BISECTIONS = 52
_NUM_TENTHS = 10
_NUM_POINTS = 1 << 14
"""Of the midpoint rule: it gives the mean of uniform draws that are shifted by 100 to 2e-8."""

Quantiles = Callable[[Tensor], Tensor]
"""Noise levels, (B,) in [0, 1], of uniform draws, (B,) in [0, 1) in float64; monotone in either direction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelShares:
    """How noise levels are distributed.

    Attributes:
        tenths: ten parts that add up to 1: of the levels from 0 to 0.1, from 0.1 to 0.2, and so on.
    """

    tenths: Sequence[float]
    mean: float

    @property
    def below_half(self) -> float:
        """Part of the levels below 0.5."""
        return sum(self.tenths[: _NUM_TENTHS // 2])


def level_shares(levels: Quantiles) -> LevelShares:
    """The distribution of the noise levels that uniform draws get.

    A share is the length of the draws that lead there, so that the tenths are exact to the rounding of
    ``levels``; the mean is the integral over the draws.
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
    for _ in range(_LEVEL_BISECTIONS):
        middle = (low + high) / 2
        is_low = (levels(middle).double() < bounds) == grows
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return low


def _grows(levels: Quantiles) -> bool:
    first, last = levels(torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)).tolist()
    return bool(first < last)
