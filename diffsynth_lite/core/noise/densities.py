"""How often each noise level is trained: quantile functions from a uniform draw to sigma.

A quantile function keeps the draw apart from its shape: the same counter-based uniform number gives the
sample's sigma under every density. The densities are those of Esser et al., "Scaling Rectified Flow
Transformers for High-Resolution Image Synthesis" (arXiv 2403.03206), section 3.1, in the form of
``diffusers.training_utils.compute_density_for_timestep_sampling``. diffusers has no ``cosmap`` density (it
draws uniformly there and only weights the loss), so that one follows the paper. ``stretched_logit_normal`` is
that of Lightricks' LTX-2 trainer (``ShiftedLogitNormalTimestepSampler`` in ``timestep_samplers.py`` of
``packages/ltx-trainer``, commit 400fd31).
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from diffsynth_lite.core.noise.shifts import shift_sigma

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
        shift: above 0; see :func:`diffsynth_lite.core.noise.shift_sigma`, by which levels are moved after
            they are drawn. A shift s moves those of ``logit_normal`` as ``log(s)`` more of ``logit_mean``
            does. In ``stretched_logit_normal`` it is that, so that what is stretched is shifted already.

    Returns:
        (B,), float32, strictly inside (0, 1).

    Raises:
        ValueError: ``logit_std``, ``mode_scale`` or ``shift`` is out of range, or the density is unknown.
    """
    draw = uniform.double()
    if density == "stretched_logit_normal":
        mean = logit_mean + math.log(shift)
        return _rounded(_stretched_logit_normal_quantile(draw, mean=mean, std=logit_std))
    if density == "uniform":
        sigma = draw
    elif density == "logit_normal":
        sigma = _logit_normal_quantile(draw, mean=logit_mean, std=logit_std)
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


def _logit_normal_quantile(draw: Tensor, *, mean: float, std: float) -> Tensor:
    _require_positive(std)
    return torch.sigmoid(mean + std * torch.special.ndtri(draw))


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
