"""Tiny pipelines in the layouts of further releases than the one that each family's own tiny pipeline has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    CogVideoXDDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    HunyuanVideo15ImageToVideoPipeline,
    Kandinsky5I2VPipeline,
    LTX2Pipeline,
    LTXConditionPipeline,
    QwenImageEditPlusPipeline,
    StableDiffusionXLPipeline,
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
)
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MINIMAX_H3_AUDIO_TAG
from diffusers.pipelines.ltx2 import LTX2VocoderWithBWE
from family_sample import CPU, PROMPTS, encode_texts
from transformers import SiglipImageProcessorPil, SiglipVisionConfig, SiglipVisionModel

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import (
    PipelineFolder,
    PreviewRequest,
    flux,
    flux2,
    hunyuan_video,
    hunyuan_video_15,
    hunyuan_video_i2v,
    kandinsky5_video,
    ltx2,
    ltx_video,
    qwen_image_edit,
    wan,
    wan_i2v,
    wan_vace,
)
from diffsynth_lite.pipelines.cogvideox import tiny as tiny_cogvideox
from diffsynth_lite.pipelines.sana import tiny as tiny_sana
from diffsynth_lite.pipelines.sdxl import SDXL
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.autoencoders import tiny_wan_vae
from diffsynth_lite.testing.text_encoders import tiny_qwen3_lm
from diffsynth_lite.testing.tokenizers import qwen2_tokenizer


def changed_model(model: Any, **settings: Any) -> Any:
    """A random model of the same class with other settings."""
    given = {name: value for name, value in model.config.items() if not name.startswith("_")}
    with seeded(0):
        return type(model)(**given | settings)


def changed(pipeline: Any, **settings: Any) -> Any:
    """The pipeline with a transformer of other settings."""
    pipeline.register_modules(transformer=changed_model(pipeline.transformer, **settings))
    return pipeline


def cogvideox(release: str) -> Any:
    """2B adds places to its tokens, and its sampler has another signal; 1.5 makes one token of two frames."""
    pipeline = tiny_cogvideox()
    settings: dict[str, Any] = {
        "2b": {"use_rotary_positional_embeddings": False},
        "5b": {},
        "1.5": {"patch_size_t": 2, "patch_bias": False, "sample_width": 20, "sample_height": 16},
    }[release]
    scale = 3.0 if release == "2b" else 1.0
    scheduler = CogVideoXDDIMScheduler.from_config(pipeline.scheduler.config, snr_shift_scale=scale)
    pipeline.register_modules(scheduler=scheduler)
    return changed(pipeline, **settings)


def schnell() -> Any:
    """FLUX.1 schnell: no guidance scale, no shift."""
    pipeline = flux.tiny()
    pipeline.register_modules(scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0))
    return changed(pipeline, guidance_embeds=False)


def klein(*, is_distilled: bool = False) -> Flux2KleinPipeline:
    """FLUX.2 klein: Qwen3 prompts, no guidance scale."""
    tokenizer, parts = qwen2_tokenizer(), flux2.tiny().components
    encoder = tiny_qwen3_lm(tokenizer)
    parts |= {"tokenizer": tokenizer, "text_encoder": encoder}
    parts["transformer"] = changed_model(parts["transformer"], guidance_embeds=False)
    return Flux2KleinPipeline(**parts, is_distilled=is_distilled)


def hunyuan_without_guidance() -> Any:
    """A HunyuanVideo that knows no guidance scale."""
    return changed(hunyuan_video.tiny(), guidance_embeds=False)


def hunyuan_of_33_channels() -> Any:
    """HunyuanVideo from images, which come after the noisy latents in the channels; it knows no scale."""
    settings = {"in_channels": 9, "guidance_embeds": False, "image_condition_type": "latent_concat"}
    return changed(hunyuan_video_i2v.tiny(), **settings)


def hunyuan_of_images() -> HunyuanVideo15ImageToVideoPipeline:
    """HunyuanVideo 1.5 from images: a SigLIP makes 4 tokens of one; its pipeline generates 64 x 32, too."""
    parts, side = hunyuan_video_15.tiny().components, 32
    # Images of the area of 45 x 45 pixels: the size of the tests of all families is one of them.
    parts["transformer"] = changed_model(parts["transformer"], target_size=45)
    config = SiglipVisionConfig(
        hidden_size=parts["transformer"].config.image_embed_dim,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=side,
        patch_size=side // 2,
    )
    with seeded(0):
        parts["image_encoder"] = SiglipVisionModel(config).eval()
    parts["feature_extractor"] = SiglipImageProcessorPil(size={"height": side, "width": side})
    return HunyuanVideo15ImageToVideoPipeline(**parts)


def kandinsky_of_images() -> Kandinsky5I2VPipeline:
    """Kandinsky 5.0 Video from images."""
    return Kandinsky5I2VPipeline(**kandinsky5_video.tiny().components)


def ltx_vae_of_0_9_5(*, denoises: bool = True) -> AutoencoderKLLTXVideo:
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


def ltx_of_conditions(*, denoises: bool = True) -> LTXConditionPipeline:
    """0.9.5 and later: images as conditions, and a sampler without a shift."""
    parts = {"vae": ltx_vae_of_0_9_5(denoises=denoises), "scheduler": FlowMatchEulerDiscreteScheduler()}
    return LTXConditionPipeline(**ltx_video.tiny().components | parts)


def decoding_timesteps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The timestep that the autoencoder gets in each decode from here on."""
    given: list[float] = []
    decode = AutoencoderKLLTXVideo.decode

    def watched(
        vae: AutoencoderKLLTXVideo, latents: torch.Tensor, timestep: torch.Tensor, **kwargs: Any
    ) -> Any:
        given.append(timestep.item())
        return decode(vae, latents, timestep, **kwargs)

    monkeypatch.setattr(AutoencoderKLLTXVideo, "decode", watched)
    return given


_GIVEN_OTHERWISE = ("isolate_modalities", "video_coords")
_GATED = ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod", "perturbed_attn")


def ltx_2_3() -> LTX2Pipeline:
    """Gates in the attention, prompts that are read by the noise level, and connectors for each stream."""
    parts: dict[str, Any] = ltx2.tiny().components
    layout = parts["connectors"].config
    prompts = {name: layout[name] for name in ("caption_channels", "text_proj_in_factor")}
    parts["connectors"] = ltx2.tiny_connectors(
        per_modality_projections=True,
        proj_bias=True,
        video_gated_attn=True,
        audio_gated_attn=True,
        video_connector_attention_head_dim=16,
        video_hidden_dim=32,
        audio_hidden_dim=16,
        **prompts,
    )
    parts["transformer"] = ltx2.tiny_transformer(use_prompt_embeddings=False, **dict.fromkeys(_GATED, True))
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


def ltx_2_5() -> LTX2Pipeline:
    """Prompts by Gemma 4, no bias in the feed-forward of clips, and the sampler of the distilled model."""
    parts = ltx_2_3().components
    parts["text_encoder"] = ltx2.tiny_gemma4(parts["tokenizer"])
    parts["transformer"] = changed_model(
        parts["transformer"], ff_bias=False, use_keyframes_abs_pos_embedding=True
    ).eval()
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler.from_config(
        parts["scheduler"].config, use_dynamic_shifting=False, shift_terminal=None
    )
    return LTX2Pipeline(**parts)


def other_guidance(folder: PipelineFolder, is_guided: bool) -> dict[str, float]:
    """Scales that its pipeline has by default, next to that of the negative prompt."""
    off = {"stg_scale": 0.0, "audio_stg_scale": 0.0}
    if not is_guided:
        scales = ("guidance_scale", "audio_guidance_scale", "modality_scale", "audio_modality_scale")
        return off | dict.fromkeys(scales, 1.0)
    return {} if folder.component_config("transformer").get("perturbed_attn") else off


def without_audio(call: dict[str, Any]) -> dict[str, Any]:
    """What the transformer gets, without the audio, which only previews have, and without masks.

    Positions, which the pipeline gives next to what they come of, have a test in ``test_ltx2.py``.
    """
    if "token_tags" in call:  # of MiniMax-H3: the audio is before the clip in its one sequence
        of_others = call["token_tags"] != MINIMAX_H3_AUDIO_TAG
        num_audio = len(of_others) - int(of_others.sum())
        rows = {name: call[name][of_others] for name in ("token_tags", "position_ids", "timestep_indices")}
        call = call | rows | {"video_indices": call["video_indices"] - num_audio}
    return {
        name: value
        for name, value in call.items()
        if not name.startswith("audio_") and "_mask" not in name and name not in _GIVEN_OTHERWISE
    }


BOUNDARY = 0.875


def two_experts() -> WanPipeline:
    """A14B: one transformer from the boundary on, another one below it."""
    second = wan.tiny_wan_transformer(32, seed=1)
    return WanPipeline(**wan.tiny().components | {"transformer_2": second}, boundary_ratio=BOUNDARY)


def vace_of_two_experts() -> WanVACEPipeline:
    """VACE-Fun A14B: the two, each with further blocks."""
    second = wan_vace.tiny_wan_vace_transformer(32, seed=1)
    return WanVACEPipeline(**wan_vace.tiny().components | {"transformer_2": second}, boundary_ratio=BOUNDARY)


def ti2v() -> WanPipeline:
    """TI2V-5B: 48 channels at 1/16, a noise level for each token."""
    parts = wan.tiny().components | {
        "vae": tiny_wan_vae(residual=True),
        "transformer": wan.tiny_wan_transformer(32, in_channels=48, out_channels=48),
    }
    return WanPipeline(**parts, expand_timesteps=True)


_EMBEDS_IMAGES = {"image_dim": 16, "added_kv_proj_dim": 24}
WAN_OF_IMAGES = {
    "i2v": _EMBEDS_IMAGES,
    "flf2v": {**_EMBEDS_IMAGES, "pos_embed_seq_len": 10},
    "a14b": {},
}
"""What the transformers of the image-to-video releases differ in."""


def wan_transformer_of_images(release: str, seed: int = 0) -> torch.nn.Module:
    model = wan.tiny_wan_transformer(32, seed=seed, in_channels=36, **WAN_OF_IMAGES[release])
    if release == "flf2v":
        # Zeros as built: which of two images comes first would not show.
        places = model.condition_embedder.image_embedder.pos_embed
        places.data.normal_(generator=torch.Generator().manual_seed(0))
    return model


def wan_of_images(release: str) -> WanImageToVideoPipeline:
    """One of the image-to-video releases."""
    parts = wan_i2v.tiny().components | {"transformer": wan_transformer_of_images(release)}
    if release != "a14b":
        return WanImageToVideoPipeline(**parts)
    parts |= {"image_encoder": None, "image_processor": None}
    parts["transformer_2"] = wan_transformer_of_images(release, seed=1)
    return WanImageToVideoPipeline(**parts, boundary_ratio=0.9)


def edit_plus() -> Any:
    """Qwen-Image-Edit-Plus, of several images, whose own noise level is zero."""
    return changed(QwenImageEditPlusPipeline(**qwen_image_edit.tiny().components), zero_cond_t=True)


def sana(**settings: Any) -> Any:
    """Sana with a transformer of other settings, in which the releases differ, but for their size."""
    return changed(tiny_sana(), **settings)


def saved_sdxl(pipeline: StableDiffusionXLPipeline, folder: Path, **changed: Any) -> SDXL:
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    config = {"force_zeros_for_empty_prompt": changed.pop("force_zeros_for_empty_prompt", True)}
    StableDiffusionXLPipeline(**(parts | changed), **config).save_pretrained(folder)
    return SDXL(PipelineFolder(path=folder))


def request_of_sdxl(family: SDXL, negative: str, **settings: Any) -> PreviewRequest:
    (conditioning,) = encode_texts(family, PROMPTS[0])
    encode = family.load_prompt_encoder(torch.float32, CPU)
    (against,) = encode([Prompt(text=negative, is_negative=True)])
    fixed = {"width": 64, "height": 32, "num_inference_steps": 2, "seed": 3}
    return PreviewRequest(conditioning=conditioning, negative=against, **fixed | settings)
