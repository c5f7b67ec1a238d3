"""A tiny pipeline in the layout of LTX-2.3, and what pipelines of LTX-2 have beside those of others."""

from typing import Any

import torch
from diffusers import AutoencoderKLLTX2Video, LTX2Pipeline
from diffusers.pipelines.ltx2 import LTX2VocoderWithBWE

from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.ltx2 import tiny, tiny_connectors, tiny_transformer
from diffsynth_lite.testing import seeded

_TOLD_APART = ("isolate_modalities", "video_coords")
_GATED = ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod", "perturbed_attn")


def of_2_3() -> LTX2Pipeline:
    """Gates in the attention, prompts that are read by the noise level, and connectors for each stream."""
    parts: dict[str, Any] = tiny().components
    layout = parts["connectors"].config
    prompts = {name: layout[name] for name in ("caption_channels", "text_proj_in_factor")}
    parts["connectors"] = tiny_connectors(
        per_modality_projections=True,
        proj_bias=True,
        video_gated_attn=True,
        audio_gated_attn=True,
        video_connector_attention_head_dim=16,
        video_hidden_dim=32,
        audio_hidden_dim=16,
        **prompts,
    )
    parts["transformer"] = tiny_transformer(use_prompt_embeddings=False, **dict.fromkeys(_GATED, True))
    settings = parts["audio_vae"].config
    with seeded(0):
        vae = AutoencoderKLLTX2Video(
            latent_channels=16,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 16, 16, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            decoder_spatio_temporal_scaling=(True, True, True, True),
            decoder_inject_noise=(False, False, False, False, False),
            upsample_type=("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
            upsample_residual=(False, False, False, False),
            upsample_factor=(2, 2, 1, 2),
            decoder_causal=False,
            decoder_spatial_padding_mode="zeros",
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        )
        vocoder = LTX2VocoderWithBWE(
            in_channels=settings.output_channels * settings.mel_bins,
            hidden_channels=64,
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3]],
            bwe_in_channels=settings.output_channels * settings.mel_bins,
            bwe_hidden_channels=32,
            bwe_resnet_kernel_sizes=[3],
            bwe_resnet_dilations=[[1, 3]],
            num_mel_channels=settings.mel_bins,
        )
    vae.latents_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    vae.latents_std.copy_(torch.linspace(0.5, 1.5, 16))
    return LTX2Pipeline(**parts | {"vae": vae.eval(), "vocoder": vocoder.eval()})


def guidance_beside(folder: PipelineFolder, is_guided: bool) -> dict[str, float]:
    """What its pipeline has on unless told otherwise, beside the guidance by a negative prompt."""
    off = {"stg_scale": 0.0, "audio_stg_scale": 0.0}
    if not is_guided:
        scales = ("guidance_scale", "audio_guidance_scale", "modality_scale", "audio_modality_scale")
        return off | dict.fromkeys(scales, 1.0)
    return {} if folder.component_config("transformer").get("perturbed_attn") else off


def without_sound(call: dict[str, Any]) -> dict[str, Any]:
    """What the transformer is told but of the sound, which previews draw and training has not, and of masks.

    Positions, which the pipeline gives beside what they come of, have a test in ``test_ltx2.py``.
    """
    return {
        name: value
        for name, value in call.items()
        if not name.startswith("audio_") and "_mask" not in name and name not in _TOLD_APART
    }
