"""LTX-Video: 0.9 and 0.9.1."""

from dataclasses import replace

from diffsynth_lite.releases.components import DIFFUSERS, T5_TOKENIZER_SLOW, T5_XXL_FP32
from diffsynth_lite.releases.release import Release, ReleaseComponent

_SCRIPT = f"{DIFFUSERS}scripts/convert_ltx_to_diffusers.py"

_V090 = Release(
    name="LTX-Video 0.9",
    hub_id="Lightricks/LTX-Video",
    pipeline_class="LTXPipeline",
    components={
        "transformer": ReleaseComponent(
            class_name="LTXVideoTransformer3DModel", source=f"{_SCRIPT}: the defaults of the class"
        ),
        "text_encoder": T5_XXL_FP32,
        "vae": ReleaseComponent(
            class_name="AutoencoderKLLTXVideo", source=f"0.9.0 in {_SCRIPT}: the defaults of the class"
        ),
    },
    scheduler=ReleaseComponent(
        class_name="FlowMatchEulerDiscreteScheduler",
        config={
            "use_dynamic_shifting": True,
            "base_shift": 0.95,
            "max_shift": 2.05,
            "base_image_seq_len": 1024,
            "max_image_seq_len": 4096,
            "shift_terminal": 0.1,
        },
        source=_SCRIPT,
    ),
    tokenizers={"tokenizer": T5_TOKENIZER_SLOW},
    size=(704, 512, 161),
    parameters=2e9,
    licence="LTX-Video Open Weights License 0.X",
    gated=False,
    sources={
        "pipeline": _SCRIPT,
        "size": "defaults of the pipeline",
        "parameters": "Lightricks/LTX-Video, README.md, which calls models of this size 2B",
        "licence": "from memory",
    },
    unconfirmed=("dtypes of all components", "licence", "gated"),
)
_V091 = replace(
    _V090,
    name="LTX-Video 0.9.1",
    hub_id="diffusers/LTX-Video-0.9.1",
    components={
        **_V090.components,
        "vae": ReleaseComponent(
            class_name="AutoencoderKLLTXVideo",
            config={
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
    },
)
LTX_VIDEO: tuple[Release, ...] = (_V090, _V091)
