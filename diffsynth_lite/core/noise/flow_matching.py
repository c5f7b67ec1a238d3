"""The straight path from data to noise, and its velocity.

Sources: Lipman et al., "Flow Matching for Generative Modeling" (arXiv 2210.02747); Liu et al., "Flow
Straight and Fast" (arXiv 2209.03003). Time runs as in diffusers: sigma 0 is data, sigma 1 is noise.
Everything here is float32, whatever the model runs in: a sigma in bfloat16 has three digits.
"""

from torch import Tensor


def add_noise(latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Point ``(1 - sigma) * latents + sigma * noise`` of the path.

    Args:
        latents: (B, ...), clean, normalised latents.
        noise: the shape of ``latents``, standard normal.
        sigma: (B,), noise level of each sample, in [0, 1].

    Returns:
        The shape of ``latents``, float32.

    Raises:
        ValueError: the shapes do not belong together.
    """
    _check_same_shape(latents, noise)
    if sigma.shape != latents.shape[:1]:
        raise ValueError(
            f"sigma has shape {tuple(sigma.shape)}; latents {tuple(latents.shape)} need one a sample"
        )
    level = sigma.float().reshape(-1, *[1] * (latents.ndim - 1))
    return (1 - level) * latents.float() + level * noise.float()


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """Direction ``noise - latents`` of the path, the training target.

    Args:
        latents: (B, ...), clean, normalised latents.
        noise: the shape of ``latents``.

    Returns:
        The shape of ``latents``, float32.

    Raises:
        ValueError: the shapes differ.
    """
    _check_same_shape(latents, noise)
    return noise.float() - latents.float()


def _check_same_shape(latents: Tensor, noise: Tensor) -> None:
    if noise.shape != latents.shape:
        raise ValueError(
            f"noise has shape {tuple(noise.shape)}, latents {tuple(latents.shape)}; they must agree"
        )
