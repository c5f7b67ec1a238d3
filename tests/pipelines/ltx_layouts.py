"""The releases of LTX-Video from 0.9.5 on in small."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXConditionPipeline

from diffsynth_lite.pipelines.ltx_video import tiny
from diffsynth_lite.testing import seeded


def vae_of_0_9_5(*, denoises: bool = True) -> AutoencoderKLLTXVideo:
    """Its blocks and downsampling, at most 32 channels wide, and its decoder, which removes noise."""
    with seeded(0):
        vae = AutoencoderKLLTXVideo(
            block_out_channels=(8, 8, 8, 8, 8),
            down_block_types=("LTXVideo095DownBlock3D",) * 4,
            layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, True, True),
            downsample_type=("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
            decoder_block_out_channels=(8, 16, 32),
            decoder_layers_per_block=(1, 1, 1, 1),
            decoder_spatio_temporal_scaling=(True, True, True),
            decoder_inject_noise=(False, False, False, False),
            upsample_residual=(True, True, True),
            upsample_factor=(2, 2, 2),
            timestep_conditioning=denoises,
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        )
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, 128))
    vae.latents_std.copy_(torch.linspace(0.5, 1.5, 128))
    return vae.eval()


def of_conditions(*, denoises: bool = True) -> LTXConditionPipeline:
    """0.9.5 and later: pictures as conditions, and a sampler without a shift."""
    parts = {"vae": vae_of_0_9_5(denoises=denoises), "scheduler": FlowMatchEulerDiscreteScheduler()}
    return LTXConditionPipeline(**tiny().components | parts)


def decoding_timesteps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The timestep that the autoencoder is told in each decode from here on."""
    told: list[float] = []
    decode = AutoencoderKLLTXVideo.decode

    def tell(vae: AutoencoderKLLTXVideo, latents: torch.Tensor, timestep: torch.Tensor, **kwargs: Any) -> Any:
        told.append(timestep.item())
        return decode(vae, latents, timestep, **kwargs)

    monkeypatch.setattr(AutoencoderKLLTXVideo, "decode", tell)
    return told
