"""How often each noise level is trained: quantile functions from a uniform draw to sigma.

A quantile function keeps the draw apart from its shape: the same counter-based uniform number gives the
sample's sigma under every density. The densities are those of Esser et al., "Scaling Rectified Flow
Transformers for High-Resolution Image Synthesis" (arXiv 2403.03206), section 3.1, in the form of
``diffusers.training_utils.compute_density_for_timestep_sampling``. diffusers has no ``cosmap`` density (it
draws uniformly there and only weights the loss), so that one follows the paper.
"""

import math
from typing import Literal

import torch
from torch import Tensor

TimestepDensity = Literal["uniform", "logit_normal", "mode", "cosmap"]

_MARGIN = 2.0**-24
"""Distance kept from 0 and 1: the spacing of float32 just below 1."""

_LARGEST_MODE_SCALE = 2 / (math.pi - 2)
"""Beyond it, or below -1, the mode density is no longer monotone and leaves [0, 1] (section 3.1)."""


def sigma_from_uniform(
    uniform: Tensor,
    density: TimestepDensity,
    *,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    mode_scale: float = 1.29,
) -> Tensor:
    """Noise levels with the given density, one for each uniform draw.

    Args:
        uniform: (B,), in [0, 1); computed in float64, so keep it on a device that has float64.
        density: ``uniform`` returns the draw; ``logit_normal`` is the sigmoid of a normal number;
            ``mode`` favours the middle (``mode_scale > 0``) or the ends (``mode_scale < 0``);
            ``cosmap`` follows the cosine schedule's ratio of noise to signal.
        logit_mean: of ``logit_normal``; above 0 favours noise.
        logit_std: of ``logit_normal``, above 0.
        mode_scale: of ``mode``, in [-1, 2 / (pi - 2)].

    Returns:
        (B,), float32, strictly inside (0, 1).

    Raises:
        ValueError: ``logit_std`` or ``mode_scale`` is out of range, or the density is unknown.
    """
    draw = uniform.double()
    if density == "uniform":
        sigma = draw
    elif density == "logit_normal":
        sigma = _logit_normal_quantile(draw, mean=logit_mean, std=logit_std)
    elif density == "mode":
        sigma = _mode_quantile(draw, scale=mode_scale)
    elif density == "cosmap":
        sigma = 1 - 1 / (torch.tan(math.pi / 2 * draw) + 1)
    else:
        raise ValueError(f"unknown timestep density {density!r}; known: uniform, logit_normal, mode, cosmap")
    return sigma.float().clamp(_MARGIN, 1 - _MARGIN)


def _logit_normal_quantile(draw: Tensor, *, mean: float, std: float) -> Tensor:
    if not std > 0:
        raise ValueError(f"logit_std is {std}; it must be above 0")
    return torch.sigmoid(mean + std * torch.special.ndtri(draw))


def _mode_quantile(draw: Tensor, *, scale: float) -> Tensor:
    if not -1 <= scale <= _LARGEST_MODE_SCALE:
        raise ValueError(f"mode_scale is {scale}; it must be in [-1, {_LARGEST_MODE_SCALE:.3f}]")
    return 1 - draw - scale * (torch.cos(math.pi / 2 * draw) ** 2 - 1 + draw)
