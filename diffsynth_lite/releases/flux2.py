"""FLUX.2: dev, and klein 4B and 9B, base and distilled."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from diffsynth_lite.releases.components import (
    DIFFUSERS,
    FLUX2_VAE,
    FLUX_SCHEDULER,
    LICENCES,
    MISTRAL3_24B,
    MUSUBI,
    PINNED_INDEXES,
    QWEN2_TOKENIZER,
    QWEN3_4B,
    QWEN3_8B,
)
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_SCRIPT = f"{DIFFUSERS}scripts/convert_flux2_to_diffusers.py"
_REVIEW = "MoDiff, data/flux2-klein-base-4b-artifact-review.json"
_ARCHITECTURES = f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py"
_SCHEDULER = replace(FLUX_SCHEDULER, source=f"that of FLUX.1 dev, as in {_SCRIPT}")


def _transformer(config: Mapping[str, Any], source: str) -> ReleaseComponent:
    return ReleaseComponent(
        class_name="Flux2Transformer2DModel", config=config, dtype="bfloat16", source=source
    )


_DEV = Release(
    name="FLUX.2 dev",
    hub_id="black-forest-labs/FLUX.2-dev",
    pipeline_class="Flux2Pipeline",
    components={
        "transformer": _transformer({}, f"`flux2-dev` in {_SCRIPT}: the defaults of the class"),
        "text_encoder": MISTRAL3_24B,
        "vae": FLUX2_VAE,
    },
    scheduler=_SCHEDULER,
    tokenizers={"tokenizer": ReleaseTokenizer(class_name="PixtralProcessor", files=("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=32e9,
    licence="FLUX Non-Commercial License",
    gated=True,
    architecture="Flux.2-dev",
    version="flux_2_dev",
    sources={
        "pipeline": PINNED_INDEXES,
        "size": "`default_sample_size` of the pipeline",
        "parameters": "black-forest-labs/flux2, README.md",
        "licence": LICENCES,
        "architecture": _ARCHITECTURES,
    },
    unconfirmed=("dtype of the transformer", "files of the tokenizer"),
)

_HEADS = MappingProxyType({"guidance_embeds": False})
_KLEIN_4B_BASE = Release(
    name="FLUX.2 klein base 4B",
    hub_id="black-forest-labs/FLUX.2-klein-base-4B",
    pipeline_class="Flux2KleinPipeline",
    components={
        "transformer": _transformer(
            {
                **_HEADS,
                "joint_attention_dim": 7680,
                "num_attention_heads": 24,
                "num_layers": 5,
                "num_single_layers": 20,
            },
            f"`klein-4b` in {_SCRIPT}; dtype from the bytes in {_REVIEW}",
        ),
        "text_encoder": QWEN3_4B,
        "vae": FLUX2_VAE,
    },
    scheduler=_SCHEDULER,
    tokenizers={"tokenizer": QWEN2_TOKENIZER},
    size=(1024, 1024, 1),
    parameters=4e9,
    licence="Apache-2.0",
    gated=False,
    architecture="Flux.2-klein-4b",
    version="flux_2_klein_4b",
    sources={
        "pipeline": f"{PINNED_INDEXES}, for klein 4B; files: {_REVIEW}",
        "size": "`default_sample_size` of the pipeline",
        "parameters": "its name",
        "licence": _REVIEW,
        "architecture": _ARCHITECTURES,
    },
    unconfirmed=("settings of the scheduler",),
)
_KLEIN_9B_BASE = replace(
    _KLEIN_4B_BASE,
    name="FLUX.2 klein base 9B",
    hub_id="black-forest-labs/FLUX.2-klein-base-9B",
    components={
        "transformer": _transformer(
            {
                **_HEADS,
                "joint_attention_dim": 12288,
                "num_attention_heads": 32,
                "num_layers": 8,
                "num_single_layers": 24,
            },
            f"`klein-9b` in {_SCRIPT}",
        ),
        "text_encoder": QWEN3_8B,
        "vae": FLUX2_VAE,
    },
    parameters=9e9,
    licence="FLUX Non-Commercial License",
    gated=True,
    architecture="Flux.2-klein-9b",
    version="flux_2_klein_9b",
    sources={**_KLEIN_4B_BASE.sources, "licence": f"that of klein 9B: {LICENCES}"},
    unconfirmed=(*_KLEIN_4B_BASE.unconfirmed, "dtype of the transformer", "licence", "whether it is gated"),
)


def _distilled(base: Release, name: str) -> Release:
    return replace(
        base,
        name=f"FLUX.2 {name}",
        hub_id=f"black-forest-labs/FLUX.2-{name.replace(' ', '-')}",
        settings={"is_distilled": True},
        distilled="4 steps without guidance",
    )


_KLEIN_4B = _distilled(_KLEIN_4B_BASE, "klein 4B")
_KLEIN_9B = _distilled(_KLEIN_9B_BASE, "klein 9B")
FLUX2: tuple[Release, ...] = (_DEV, _KLEIN_4B_BASE, _KLEIN_4B, _KLEIN_9B_BASE, _KLEIN_9B)
