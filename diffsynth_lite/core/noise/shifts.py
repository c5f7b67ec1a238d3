"""How noise levels move with resolution: larger pictures need more noise to be destroyed as much.

The shift is applied here rather than by a diffusers scheduler, because
``FlowMatchEulerDiscreteScheduler`` ignores its ``shift`` when ``use_dynamic_shifting`` is set.
"""

import math

from torch import Tensor


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """Static shift ``s * sigma / (1 + (s - 1) * sigma)``; 1 changes nothing, above 1 adds noise.

    Source: arXiv 2403.03206, equation 23.

    Args:
        sigma: any shape, in [0, 1]; 0 and 1 stay where they are.
        shift: above 0.

    Returns:
        The shape and dtype of ``sigma``, in [0, 1].

    Raises:
        ValueError: ``shift`` is not above 0.
    """
    if not shift > 0:
        raise ValueError(f"shift is {shift}; it must be above 0 (1 changes nothing)")
    scaled = shift * sigma
    # Written this way, the result cannot round to above 1.
    return scaled / (scaled + (1 - sigma))


def exponential_shift(sigma: Tensor, mu: float) -> Tensor:
    """Shift ``exp(mu) / (exp(mu) + 1 / sigma - 1)``: the static shift by ``exp(mu)``, finite at sigma 0.

    Source: ``FlowMatchEulerDiscreteScheduler.time_shift`` with ``time_shift_type="exponential"``.

    Args:
        sigma: any shape, in [0, 1].
        mu: 0 changes nothing, above 0 adds noise; see ``resolution_mu``.

    Returns:
        The shape and dtype of ``sigma``, in [0, 1].
    """
    return shift_sigma(sigma, math.exp(mu))


def resolution_mu(
    num_tokens: int, *, base_shift: float, max_shift: float, base_tokens: int, max_tokens: int
) -> float:
    """``mu`` of the exponential shift, linear in the number of image tokens.

    The line is not cut off outside its two points. Source: ``calculate_shift`` of diffusers' pipelines.

    Args:
        num_tokens: image tokens that the transformer sees.
        base_shift: ``mu`` at ``base_tokens``.
        max_shift: ``mu`` at ``max_tokens``.
        base_tokens: tokens of the small resolution (256 in most models).
        max_tokens: tokens of the large resolution (4096 in most models), other than ``base_tokens``.
    """
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return base_shift + slope * (num_tokens - base_tokens)
