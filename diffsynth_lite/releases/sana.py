"""Sana 1.0 of 0.6 and 1.6 billion parameters, and Sana 1.5 of 1.6 and 4.8 billion."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from diffsynth_lite.releases.components import DIFFUSERS, LICENCES, ONE_TRAINER
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_SCRIPT = f"{DIFFUSERS}scripts/convert_sana_to_diffusers.py"
_DOCS = f"{DIFFUSERS}docs/source/en/api/pipelines/sana.md"
_HUB = "Efficient-Large-Model"


def _transformer(name: str, config: Mapping[str, Any]) -> ReleaseComponent:
    return ReleaseComponent(
        class_name="SanaTransformer2DModel", config=config, source=f"`{name}` in {_SCRIPT}"
    )


def _in_float32(component: ReleaseComponent) -> ReleaseComponent:
    """Of Sana 1.0, whose plain files are beside those of a variant."""
    return replace(
        component, dtype="float32", source=f"{component.source}; dtype of the plain files as in {_DOCS}"
    )


_SMALL = {
    "cross_attention_dim": 1152,
    "cross_attention_head_dim": 72,
    "num_attention_heads": 36,
    "num_cross_attention_heads": 16,
    "num_layers": 28,
}
_1600M = Release(
    name="Sana 1.0 1.6B",
    hub_id=f"{_HUB}/Sana_1600M_1024px_BF16_diffusers",
    pipeline_class="SanaPipeline",
    components={
        "transformer": _in_float32(_transformer("SanaMS_1600M_P1_D20", {})),
        "text_encoder": ReleaseComponent(
            class_name="Gemma2Model",
            dtype="bfloat16",
            source=f"gemma-2-2b-it, which {_SCRIPT} loads in bfloat16: the defaults of the class",
        ),
        "vae": ReleaseComponent(
            class_name="AutoencoderDC",
            config={
                "downsample_block_type": "conv",
                "encoder_block_types": (*("ResBlock",) * 3, *("EfficientViTBlock",) * 3),
                "decoder_block_types": (*("ResBlock",) * 3, *("EfficientViTBlock",) * 3),
                "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
                "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
                "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
                "scaling_factor": 0.41407,
                "upsample_block_type": "interpolate",
            },
            dtype="float32",
            source=f"`dc-ae-f32c32-sana-1.0` in {DIFFUSERS}scripts/convert_dcae_to_diffusers.py; "
            f"{_SCRIPT} loads 1.1, whose settings were not found, in float32",
        ),
    },
    scheduler=ReleaseComponent(
        class_name="DPMSolverMultistepScheduler",
        config={"flow_shift": 3.0, "prediction_type": "flow_prediction", "use_flow_sigmas": True},
        source=_SCRIPT,
    ),
    tokenizers={"tokenizer": ReleaseTokenizer(class_name="GemmaTokenizerFast", files=("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=1.6e9,
    variants=("bf16",),
    licence="Apache-2.0",
    gated=None,
    architecture="sana",
    sources={
        "pipeline": f"{_SCRIPT}; variants: {_DOCS}",
        "size": "its name",
        "parameters": "its name",
        "licence": LICENCES,
        "architecture": f"{ONE_TRAINER}sana-lora.json",
    },
    unconfirmed=(
        "settings of the autoencoder",
        "class and files of the tokenizer",
    ),
)
_600M = replace(
    _1600M,
    name="Sana 1.0 0.6B",
    hub_id=f"{_HUB}/Sana_600M_1024px_diffusers",
    components={
        **_1600M.components,
        "transformer": _in_float32(_transformer("SanaMS_600M_P1_D28", _SMALL)),
    },
    parameters=0.6e9,
    variants=("fp16",),
)
_15_1600M = replace(
    _1600M,
    name="Sana 1.5 1.6B",
    hub_id=f"{_HUB}/SANA1.5_1.6B_1024px_diffusers",
    components={
        **_1600M.components,
        "transformer": _transformer("SanaMS1.5_1600M_P1_D20", {"qk_norm": "rms_norm_across_heads"}),
    },
    variants=(),
    unconfirmed=(*_1600M.unconfirmed, "dtype of the transformer"),
)
_15_4800M = replace(
    _15_1600M,
    name="Sana 1.5 4.8B",
    hub_id=f"{_HUB}/SANA1.5_4.8B_1024px_diffusers",
    components={
        **_1600M.components,
        "transformer": _transformer(
            "SanaMS1.5_4800M_P1_D60", {"num_layers": 60, "qk_norm": "rms_norm_across_heads"}
        ),
    },
    parameters=4.8e9,
)
SANA: tuple[Release, ...] = (_600M, _1600M, _15_1600M, _15_4800M)
