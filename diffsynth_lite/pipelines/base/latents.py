"""This file turns pixels into latents as transformers want them: of about zero mean and unit variance."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pixel_unshuffle

_channel_first = partial(pixel_unshuffle, downscale_factor=2)


@torch.no_grad()
def encode_latents(vae: Any, pixels_bcfhw: torch.Tensor) -> torch.Tensor:
    """Normalised latents: the mode of what a video autoencoder of the Wan kind gives.

    Args:
        vae: an ``AutoencoderKLWan`` or ``AutoencoderKLQwenImage``; its settings hold the statistics.
        pixels_bcfhw: (B, 3, F, H, W), in [-1, 1].

    Returns:
        (B, C, f, h, w), ``(z - mean) / std`` in fp32, on the CPU.
    """
    latents_bcfhw = vae.encode(pixels_bcfhw.to(vae.device, vae.dtype)).latent_dist.mode().float().cpu()
    mean, std = (
        torch.tensor(values).view(-1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    normalised_bcfhw: torch.Tensor = (latents_bcfhw - mean) / std
    return normalised_bcfhw


@torch.no_grad()
def encode_scaled_latents(vae: Any, pixels_bchw: torch.Tensor) -> torch.Tensor:
    """Normalised latents: the mode of what an ``AutoencoderKL`` gives, or one of clips with such settings.

    Args:
        vae: its settings hold ``scaling_factor`` and, in some models, ``shift_factor``.
        pixels_bchw: (B, 3, H, W), in [-1, 1]; of clips (B, 3, F, H, W).

    Returns:
        (B, C, h, w), of clips (B, C, f, h, w), ``(z - shift_factor) * scaling_factor`` in fp32, on the CPU.
    """
    latents_bchw = vae.encode(pixels_bchw.to(vae.device, vae.dtype)).latent_dist.mode().float().cpu()
    normalised_bchw: torch.Tensor = (
        latents_bchw - (vae.config.get("shift_factor") or 0.0)
    ) * vae.config.scaling_factor
    return normalised_bchw


@torch.no_grad()
def encode_patched_latents(
    vae: Any,
    pixels_bchw: torch.Tensor,
    patched: Callable[[torch.Tensor], torch.Tensor] = _channel_first,
    *,
    eps: float | None = None,
) -> torch.Tensor:
    """Normalised latents of tokens: the mode of what an ``AutoencoderKLFlux2`` gives, 2 x 2 places in one.

    Args:
        vae: its batch norm, which it never runs, holds the statistics.
        pixels_bchw: (B, 3, H, W), in [-1, 1].
        patched: brings 2 x 2 places together; by default as ``Flux2Pipeline._patchify_latents``, in the order
            channel, row, column.
        eps: added to the variance; None takes it from the autoencoder's settings.

    Returns:
        (B, 4 * C, h / 2, w / 2), ``(z - mean) / sqrt(variance + eps)`` in fp32, on the CPU.
    """
    latents_bchw = vae.encode(pixels_bchw.to(vae.device, vae.dtype)).latent_dist.mode().float().cpu()
    patched_bchw = patched(latents_bchw)
    mean, variance = (
        values.float().cpu().view(-1, 1, 1) for values in (vae.bn.running_mean, vae.bn.running_var)
    )
    added = vae.config.batch_norm_eps if eps is None else eps
    normalised_bchw: torch.Tensor = (patched_bchw - mean) / torch.sqrt(variance + added)
    return normalised_bchw


def scaled_latents_shape(vae_config: Mapping[str, Any], width: int, height: int) -> tuple[int, int, int]:
    """Shape of the latents that an ``AutoencoderKL`` of these settings makes of an image in pixels."""
    scale = 2 ** (len(vae_config["block_out_channels"]) - 1)
    return vae_config["latent_channels"], height // scale, width // scale
