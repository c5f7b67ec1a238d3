"""LTX-2 19B, LTX-2.3 22B and LTX-2.5 22B."""

from dataclasses import replace

from diffsynth_lite.pipelines.ltx_video.releases import LTX_SCHEDULER
from diffsynth_lite.releases.components import DIFFUSERS, SWARM, encoder_sizes
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_SCRIPT = f"{DIFFUSERS}scripts/convert_ltx2_to_diffusers.py"
_DOCS = f"{DIFFUSERS}docs/source/en/api/pipelines/ltx2.md"
_CONNECTOR = {"caption_channels": 3840, "text_proj_in_factor": 49, "rope_type": "split"}
_GEMMA3 = ReleaseComponent(
    "Gemma3ForConditionalGeneration",
    {
        "text_config": {
            "model_type": "gemma3_text",
            "sliding_window": 1024,
            **encoder_sizes(3840, 15360, 16, 48, 8, head_dim=256),
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "image_size": 896,
            "patch_size": 14,
            **encoder_sizes(1152, 4304, 16, 27),
        },
    },
    dtype="bfloat16",
    source=f"google/gemma-3-12b-it-qat-q4_0-unquantized, which {_SCRIPT} takes, by default in bfloat16; its "
    "layers and width as the connectors there, its other numbers from memory",
)
_19B = Release(
    name="LTX-2 19B",
    hub_id="Lightricks/LTX-2",
    pipeline_class="LTX2Pipeline",
    components={
        "transformer": ReleaseComponent(
            "LTX2VideoTransformer3DModel",
            {"rope_type": "split"},
            dtype="bfloat16",
            source=f"2.0 in {_SCRIPT}",
        ),
        "text_encoder": _GEMMA3,
        "connectors": ReleaseComponent(
            "ltx2.LTX2TextConnectors", _CONNECTOR, dtype="bfloat16", source=f"2.0 in {_SCRIPT}"
        ),
        "vae": ReleaseComponent(
            "AutoencoderKLLTX2Video",
            {
                "decoder_causal": False,
                "spatial_compression_ratio": 32,
                "temporal_compression_ratio": 8,
            },
            dtype="bfloat16",
            source=f"2.0 in {_SCRIPT}",
        ),
        "audio_vae": ReleaseComponent("AutoencoderKLLTX2Audio", dtype="bfloat16", source=f"2.0 in {_SCRIPT}"),
        "vocoder": ReleaseComponent("ltx2.LTX2Vocoder", dtype="bfloat16", source=f"2.0 in {_SCRIPT}"),
    },
    scheduler=replace(LTX_SCHEDULER, source=_SCRIPT),
    tokenizers={"tokenizer": ReleaseTokenizer("GemmaTokenizer")},
    size=(768, 512, 121),
    parameters=19e9,
    licence="LTX-2.x Community License Agreement",
    gated=None,
    architecture="lightricks-ltx-video-2",
    sources={
        "pipeline": f"{_DOCS}; class of the tokenizer from the docstring of the pipeline",
        "size": "defaults of the pipeline",
        "parameters": "its name",
        "licence": "Lightricks/LTX-2, LICENSE of the code's repository",
        "architecture": SWARM,
    },
    unconfirmed=(
        "dtypes of the files",
        "numbers of the text encoder but its layers and width",
        "that the weights have the licence of the code",
    ),
)
_GATED = {
    name: value
    for stream, head_dim in (("video", 128), ("audio", 64))
    for name, value in {
        f"{stream}_connector_attention_head_dim": head_dim,
        f"{stream}_connector_num_attention_heads": 32,
        f"{stream}_connector_num_layers": 8,
        f"{stream}_gated_attn": True,
    }.items()
}
_22B = _19B.but(
    "LTX-2.3 22B",
    "diffusers/LTX-2.3-Diffusers",
    transformer=ReleaseComponent(
        "LTX2VideoTransformer3DModel",
        {
            "audio_cross_attn_mod": True,
            "audio_gated_attn": True,
            "cross_attn_mod": True,
            "gated_attn": True,
            "perturbed_attn": True,
            "rope_type": "split",
            "use_prompt_embeddings": False,
        },
        dtype="bfloat16",
        source=f"2.3 in {_SCRIPT}",
    ),
    connectors=ReleaseComponent(
        "ltx2.LTX2TextConnectors",
        {**_CONNECTOR, **_GATED, "per_modality_projections": True, "proj_bias": True},
        dtype="bfloat16",
        source=f"2.3 in {_SCRIPT}",
    ),
    vae=ReleaseComponent(
        "AutoencoderKLLTX2Video",
        {
            "block_out_channels": (256, 512, 1024, 1024),
            "decoder_block_out_channels": (256, 512, 512, 1024),
            "decoder_causal": False,
            "decoder_inject_noise": (False,) * 5,
            "decoder_layers_per_block": (4, 6, 4, 2, 2),
            "decoder_spatial_padding_mode": "zeros",
            "decoder_spatio_temporal_scaling": (True,) * 4,
            "layers_per_block": (4, 6, 4, 2, 2),
            "spatial_compression_ratio": 32,
            "temporal_compression_ratio": 8,
            "upsample_factor": (2, 2, 1, 2),
            "upsample_residual": (False,) * 4,
            "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        },
        dtype="bfloat16",
        source=f"2.3 in {_SCRIPT}",
    ),
    vocoder=ReleaseComponent("ltx2.LTX2VocoderWithBWE", dtype="bfloat16", source=f"2.3 in {_SCRIPT}"),
    parameters=19e9,
    architecture="lightricks-ltx-video-2-3",
    sources={"parameters": "as the 19B, whose blocks it has; the 22 of its name count the connectors, too"},
)
SAMPLER_OF_FULL = {"use_dynamic_shifting": True, "shift_terminal": 0.1}
"""Settings of LTX-2.5's scheduler for the full model; its folder has those for the distilled one."""
_GEMMA4 = ReleaseComponent(
    "Gemma4UnifiedForConditionalGeneration",
    {
        "text_config": {
            "model_type": "gemma4_unified_text",
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            **encoder_sizes(3840, 15360, 16, 48, 8, head_dim=256),
        },
        "vision_config": {"model_type": "gemma4_unified_vision"},
        "audio_config": {"model_type": "gemma4_unified_audio"},
    },
    dtype="bfloat16",
    source="fine-tuned from Gemma 4 12B, with the layers and width of Gemma 3 12B: ai-toolkit, "
    "convert_ltx2_to_diffusers.py; its other numbers give the 11,959,730,224 that google/gemma-4-12B has",
)
_25 = _22B.but(
    "LTX-2.5 22B",
    "Lightricks/LTX-2.5-Diffusers",
    transformer=ReleaseComponent(
        "LTX2VideoTransformer3DModel",
        {
            **_22B.components["transformer"].config,
            "ff_bias": False,
            "use_keyframes_abs_pos_embedding": True,
        },
        dtype="bfloat16",
        source=f"2.5 in {_SCRIPT}",
    ),
    text_encoder=_GEMMA4,
    optional_components=("duration_head", "processor", "prompt_enhancer"),
    scheduler=replace(
        LTX_SCHEDULER,
        config={key: value for key, value in LTX_SCHEDULER.config.items() if key not in SAMPLER_OF_FULL},
        source=f"{_DOCS}: that of the distilled transformer",
    ),
    gated=True,
    distilled="8 steps without guidance",
    architecture=None,
    sources={
        "licence": "Lightricks/LTX-2.5-Diffusers, its card",
        "architecture": "no program is known to give it one",
    },
    unconfirmed=(
        "dtypes of the files",
        "numbers of the text encoder, but for its layers, width and size",
        "class of the tokenizer",
    ),
)
LTX_2: tuple[Release, ...] = (_19B, _22B, _25)
