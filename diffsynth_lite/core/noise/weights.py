"""How much the loss at each noise level counts."""

import math
from typing import Literal

import torch
from torch import Tensor

LossWeighting = Literal["none", "sigma_sqrt", "cosmap", "bell", "min_snr"]
"""``min_snr`` depends on the path from data to noise: see :class:`diffsynth_lite.core.noise.NoisePath`."""

_BELL_FLOOR = math.exp(-0.5)
"""Height of ``exp(-2 * (sigma - 0.5)**2)`` at sigma 0 and 1, taken off so that the bell ends at 0."""

_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - _BELL_FLOOR
"""Integral over sigma in [0, 1] of the bell before normalising."""

_SMALLEST_GRID_SIGMA = 1e-3
"""Lowest level of the 1000 timesteps that ``sigma**-2`` was made for; below it, it has no bound."""


def loss_weight(sigma: Tensor, weighting: LossWeighting) -> Tensor:
    """Factor for the loss of a sample at noise level ``sigma``.

    ``none`` is 1; ``sigma_sqrt`` is ``sigma**-2``, 1e6 at the most, and ``cosmap`` is
    ``2 / (pi * (1 - 2 sigma + 2 sigma**2))``, both as ``compute_loss_weighting_for_sd3`` of
    ``diffusers.training_utils`` (arXiv 2403.03206, section 3.1).
    ``bell`` is ``exp(-2 * (sigma - 0.5)**2)``, lowered to 0 at both ends and scaled to a mean of 1 over
    uniform sigma: the flow-matching weight of DiffSynth-Studio (``FlowMatchScheduler.set_training_weight``)
    in closed form, where upstream normalises over its own shifted grid.

    Args:
        sigma: any shape, in (0, 1).
        weighting: one of the four above.

    Returns:
        The shape of ``sigma``, float32, not negative.

    Raises:
        ValueError: the weighting is another one.
    """
    sigma = sigma.float()
    if weighting == "none":
        return torch.ones_like(sigma)
    if weighting == "sigma_sqrt":
        return sigma.clamp(min=_SMALLEST_GRID_SIGMA) ** -2.0
    if weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    if weighting == "bell":
        bump = torch.exp(-2 * (sigma - 0.5) ** 2) - _BELL_FLOOR
        return bump.clamp(min=0) / _BELL_MEAN
    raise ValueError(f"{weighting!r} is no weight of sigma alone; known: none, sigma_sqrt, cosmap, bell")
