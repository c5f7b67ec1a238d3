"""LTX-Video: 0.9 to 0.9.8."""

from dataclasses import replace

from diffsynth_lite.releases.components import DIFFUSERS, PINNED_FILES, SWARM, T5_TOKENIZER_SLOW, T5_XXL_FP32
from diffsynth_lite.releases.release import Release, ReleaseComponent

_SCRIPT = f"{DIFFUSERS}scripts/convert_ltx_to_diffusers.py"

LTX_SCHEDULER = ReleaseComponent(
    "FlowMatchEulerDiscreteScheduler",
    {
        "use_dynamic_shifting": True,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "base_image_seq_len": 1024,
        "max_image_seq_len": 4096,
        "shift_terminal": 0.1,
    },
    source=_SCRIPT,
)
_V090 = Release(
    name="LTX-Video 0.9",
    hub_id="Lightricks/LTX-Video",
    pipeline_class="LTXPipeline",
    components={
        "transformer": ReleaseComponent(
            "LTXVideoTransformer3DModel", source=f"{_SCRIPT}: the defaults of the class"
        ),
        "text_encoder": T5_XXL_FP32,
        "vae": ReleaseComponent(
            "AutoencoderKLLTXVideo", source=f"0.9.0 in {_SCRIPT}: the defaults of the class"
        ),
    },
    scheduler=LTX_SCHEDULER,
    tokenizers={"tokenizer": T5_TOKENIZER_SLOW},
    size=(704, 512, 161),
    parameters=2e9,
    licence="LTX-Video Open Weights License 0.X",
    gated=None,
    architecture="lightricks-ltx-video",
    sources={
        "pipeline": _SCRIPT,
        "size": "defaults of the pipeline",
        "parameters": "Lightricks/LTX-Video, README.md, which calls models of this size 2B",
        "licence": "from memory",
        "architecture": SWARM,
    },
    unconfirmed=("dtypes", "licence"),
)
_V091 = _V090.but(
    "LTX-Video 0.9.1",
    "diffusers/LTX-Video-0.9.1",
    vae=ReleaseComponent(
        "AutoencoderKLLTXVideo",
        {
            "decoder_block_out_channels": (256, 512, 1024),
            "decoder_inject_noise": (True, True, True, False),
            "decoder_layers_per_block": (5, 6, 7, 8),
            "decoder_spatio_temporal_scaling": (True, True, True),
            "timestep_conditioning": True,
            "upsample_factor": (2, 2, 2),
            "upsample_residual": (True, True, True),
        },
        source=f"0.9.1 in {_SCRIPT}",
    ),
)
_V095 = _V090.but(
    "LTX-Video 0.9.5",
    "Lightricks/LTX-Video-0.9.5",
    pipeline_class="LTXConditionPipeline",
    vae=ReleaseComponent(
        "AutoencoderKLLTXVideo",
        {
            "block_out_channels": (128, 256, 512, 1024, 2048),
            "decoder_block_out_channels": (256, 512, 1024),
            "decoder_inject_noise": (False, False, False, False),
            "decoder_layers_per_block": (5, 5, 5, 5),
            "decoder_spatio_temporal_scaling": (True, True, True),
            "down_block_types": ("LTXVideo095DownBlock3D",) * 4,
            "downsample_type": ("spatial", "temporal", "spatiotemporal", "spatiotemporal"),
            "layers_per_block": (4, 6, 6, 2, 2),
            "spatial_compression_ratio": 32,
            "spatio_temporal_scaling": (True, True, True, True),
            "temporal_compression_ratio": 8,
            "timestep_conditioning": True,
            "upsample_factor": (2, 2, 2),
            "upsample_residual": (True, True, True),
        },
        source=f"0.9.5 in {_SCRIPT}",
    ),
    scheduler=ReleaseComponent("FlowMatchEulerDiscreteScheduler", source=f"0.9.5 in {_SCRIPT}"),
    licence="OpenRAIL-M",
    sources={
        "pipeline": f"{DIFFUSERS}docs/source/en/api/pipelines/ltx_video.md",
        "licence": "Lightricks/LTX-Video, README.md",
    },
    unconfirmed=(
        "dtypes",
        f"pipeline class: {_SCRIPT} writes LTXPipeline",
    ),
)
_V097 = _V095.but(
    "LTX-Video 0.9.7 dev",
    "Lightricks/LTX-Video-0.9.7-dev",
    transformer=ReleaseComponent(
        "LTXVideoTransformer3DModel",
        {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
        source=f"0.9.7 in {_SCRIPT}",
    ),
    parameters=13e9,
    licence="LTX-Video Open Weights License 0.X",
    sources={**_V090.sources, "parameters": "Lightricks/LTX-Video, README.md"},
    unconfirmed=("dtypes", "licence"),
)
_V097_DISTILLED = _V097.but(
    "LTX-Video 0.9.7 distilled",
    "Lightricks/LTX-Video-0.9.7-distilled",
    distilled="4 to 10 steps without guidance",
)
_V098_DISTILLED = _V097_DISTILLED.but(
    "LTX-Video 0.9.8 13B distilled",
    "Lightricks/LTX-Video-0.9.8-13B-distilled",
    transformer=replace(
        _V097.components["transformer"],
        dtype="bfloat16",
        source=f"0.9.7 in {_SCRIPT}; dtype from the six shards in {PINNED_FILES}",
    ),
    unconfirmed=("that its settings are those of 0.9.7", "dtype of the autoencoder", *_V097.unconfirmed[1:]),
)
LTX_VIDEO: tuple[Release, ...] = (_V090, _V091, _V095, _V097, _V097_DISTILLED, _V098_DISTILLED)
