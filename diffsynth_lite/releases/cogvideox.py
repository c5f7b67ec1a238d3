"""CogVideoX 2B and 5B, and CogVideoX 1.5 5B, of text to video."""

from dataclasses import replace
from typing import Any

from diffsynth_lite.releases.components import DIFFUSERS, T5_TOKENIZER_SLOW, T5_XXL
from diffsynth_lite.releases.release import Release, ReleaseComponent

_SCRIPT = f"{DIFFUSERS}scripts/convert_cogvideox_to_diffusers.py"
_TRAINING = f"{DIFFUSERS}examples/cogvideo/train_cogvideox_lora.py"


def _scheduler(snr_shift_scale: float) -> ReleaseComponent:
    return ReleaseComponent(
        class_name="CogVideoXDDIMScheduler",
        config={
            "clip_sample": False,
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "snr_shift_scale": snr_shift_scale,
            "timestep_spacing": "trailing",
        },
        source=_SCRIPT,
    )


def _vae(**config: Any) -> ReleaseComponent:
    return ReleaseComponent(
        class_name="AutoencoderKLCogVideoX",
        config=config,
        source=f"{_SCRIPT}: else the defaults of the class",
    )


_2B = Release(
    name="CogVideoX 2B",
    hub_id="THUDM/CogVideoX-2b",
    pipeline_class="CogVideoXPipeline",
    components={
        "transformer": ReleaseComponent(
            class_name="CogVideoXTransformer3DModel",
            dtype="float16",
            source=f"{_SCRIPT}: the defaults of the class; dtype from {_TRAINING}",
        ),
        "text_encoder": replace(
            T5_XXL, dtype=None, num_bytes=None, source=f"google/t5-v1_1-xxl, as in {_SCRIPT}"
        ),
        "vae": _vae(scaling_factor=1.15258426),
    },
    scheduler=_scheduler(3.0),
    tokenizers={"tokenizer": T5_TOKENIZER_SLOW},
    size=(720, 480, 49),
    parameters=None,
    licence="Apache-2.0",
    gated=None,
    sources={
        "pipeline": _SCRIPT,
        "size": "THUDM/CogVideo, README.md",
        "parameters": "none but those rounded in their names",
        "licence": "from memory",
        "architecture": "no program is known to give it one",
    },
    unconfirmed=(
        "dtypes of text encoder and autoencoder",
        "timestep_spacing: linspace in other copies",
        "licence",
    ),
)
_5B = replace(
    _2B,
    name="CogVideoX 5B",
    hub_id="THUDM/CogVideoX-5b",
    components={
        **_2B.components,
        "transformer": ReleaseComponent(
            class_name="CogVideoXTransformer3DModel",
            config={"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
            dtype="bfloat16",
            source=f"{_SCRIPT}; dtype from {_TRAINING}",
        ),
        "vae": _vae(scaling_factor=0.7),
    },
    scheduler=_scheduler(1.0),
    licence="CogVideoX License",
)
_1_5 = replace(
    _5B,
    name="CogVideoX 1.5 5B",
    hub_id="THUDM/CogVideoX1.5-5B",
    components={
        **_5B.components,
        "transformer": ReleaseComponent(
            class_name="CogVideoXTransformer3DModel",
            config={
                "num_attention_heads": 48,
                "num_layers": 42,
                "patch_bias": False,
                "patch_size_t": 2,
                "sample_frames": 81,
                "sample_height": 300,
                "sample_width": 300,
                "use_rotary_positional_embeddings": True,
            },
            source=_SCRIPT,
        ),
        "vae": _vae(invert_scale_latents=True, scaling_factor=0.7),
    },
    size=(1360, 768, 81),
    sources={**_5B.sources, "size": "the page of THUDM/CogVideo on DeepWiki, of its README.md"},
    unconfirmed=(*_5B.unconfirmed, "dtype of the transformer", "its sample_height and sample_width"),
)
COGVIDEOX: tuple[Release, ...] = (_2B, _5B, _1_5)
