"""This file turns pixels into latents as transformers want them: of about zero mean and unit variance."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
)
from torch.nn.functional import pixel_unshuffle

_channel_first = partial(pixel_unshuffle, downscale_factor=2)
_RATIOS = ("spatial_compression_ratio", "temporal_compression_ratio")

_SCALES: Mapping[Any, Callable[[Mapping[str, Any]], tuple[int, ...]]] = MappingProxyType(
    {
        AutoencoderDC: lambda config: (2 ** (len(config["encoder_block_out_channels"]) - 1),),
        AutoencoderKL: lambda config: (2 ** (len(config["block_out_channels"]) - 1),),
        AutoencoderKLCogVideoX: lambda _: (8, 4),
        AutoencoderKLLTX2Video: lambda _: (32, 8),
        AutoencoderKLLTXVideo: lambda _: (32, 8),
        AutoencoderKLFlux2: lambda config: (2 ** len(config["block_out_channels"]),),  # 2 x 2 places in one
        AutoencoderKLHunyuanVideo: lambda config: tuple(config[name] for name in _RATIOS),
        AutoencoderKLHunyuanVideo15: lambda config: tuple(config[name] for name in _RATIOS),
        # Each image is encoded by itself.
        AutoencoderKLQwenImage: lambda config: (2 ** len(config["temperal_downsample"]), 1),
        AutoencoderKLQwenImage21: lambda config: (config["scale_factor_spatial"], 1),
        # A folder saved by an older diffusers lacks the two.
        AutoencoderKLWan: lambda config: (
            config.get("scale_factor_spatial", 8),
            config.get("scale_factor_temporal", 4),
        ),
    }
)
"""Pixels of a side to one place, and frames where latents have such an axis: by an autoencoder's settings."""


def latents_shape(vae_class: Any, config: Mapping[str, Any], size: tuple[int, int, int]) -> tuple[int, ...]:
    """Shape of the latents of media, without a batch axis.

    Args:
        config: the autoencoder's settings, as its ``config.json`` holds them.
        size: width, height and frames, of which latents begin with one of its own.
    """
    width, height, num_frames = size
    scale, *frame_scale = _SCALES[vae_class](config)
    channels = config["z_dim"] if "z_dim" in config else config["latent_channels"]
    of_a_place = 4 if vae_class is AutoencoderKLFlux2 else 1
    frames = [(num_frames - 1) // one + 1 for one in frame_scale]
    return channels * of_a_place, *frames, height // scale, width // scale


@torch.no_grad()
def encode_latents(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Normalised latents by an autoencoder of any of these classes; of its distribution the mode.

    Args:
        pixels: (B, 3, H, W), in [-1, 1]; of clips (B, 3, F, H, W).

    Returns:
        (B, C, h, w), or (B, C, f, h, w) where latents have an axis of frames, in fp32, on the CPU.
    """
    if hasattr(vae, "bn"):
        return encode_patched_latents(vae, pixels)
    is_of_wan = "z_dim" in vae.config  # or of its kind, whose settings hold statistics of each channel
    if is_of_wan and pixels.ndim == 4:
        pixels = pixels.unsqueeze(2)
    encoded = vae.encode(pixels.to(vae.device, vae.dtype))
    # That of Sana gives one latent for an image, and not a distribution.
    latents: torch.Tensor = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
    latents = latents.float().cpu()
    if "latents_mean" in dict(vae.named_buffers(recurse=False)):  # of LTX
        mean, std = (values.float().cpu().view(-1, 1, 1, 1) for values in (vae.latents_mean, vae.latents_std))
        normalised: torch.Tensor = (latents - mean) * vae.config.scaling_factor / std
        return normalised
    if is_of_wan:
        mean, std = (
            torch.tensor(values).view(-1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        return (latents - mean) / std
    scale: float = vae.config.scaling_factor
    return (latents - (vae.config.get("shift_factor") or 0.0)) * scale


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
