"""This file says what a model that knows a guidance scale is told in training."""

import torch


def training_guidance(sigma: torch.Tensor) -> torch.Tensor:
    """The scale of each sample: 1 asks for no guidance, because the target is that of the data alone.

    Args:
        sigma: (B,), noise level.

    Returns:
        (B,)
    """
    return torch.ones_like(sigma)
