"""Chroma1: HD and Base."""

from dataclasses import replace

from diffsynth_lite.releases.components import (
    FLUX_VAE,
    LICENCES,
    SD_SCRIPTS,
    SDNEXT,
    T5_TOKENIZER_SLOW,
    T5_XXL,
)
from diffsynth_lite.releases.release import Release, ReleaseComponent

_REVIEW = "MoDiff, data/chroma1-hd-artifact-review.json"

_HD = Release(
    name="Chroma1 HD",
    hub_id="lodestones/Chroma1-HD",
    pipeline_class="ChromaPipeline",
    components={
        "transformer": ReleaseComponent(
            class_name="ChromaTransformer2DModel",
            dtype="bfloat16",
            source=f"{SDNEXT}chroma/transformer: the class's defaults; dtype from the bytes in {_REVIEW}",
        ),
        "text_encoder": T5_XXL,
        "vae": FLUX_VAE,
    },
    scheduler=ReleaseComponent(
        class_name="FlowMatchEulerDiscreteScheduler",
        config={"shift": 3.0, "use_dynamic_shifting": True},
        source=f"{SDNEXT}chroma/scheduler",
    ),
    tokenizers={"tokenizer": T5_TOKENIZER_SLOW},
    size=(1024, 1024, 1),
    parameters=8.9e9,
    licence="Apache-2.0",
    gated=False,
    architecture="chroma",
    version="chroma",
    sources={
        "pipeline": f"{SDNEXT}chroma/model_index.json",
        "size": "`default_sample_size` of the pipeline",
        "parameters": "diffusers, docs/source/en/api/pipelines/chroma.md",
        "licence": _REVIEW,
        "architecture": f"{SD_SCRIPTS}sai_model_spec.py, flux_utils.py",
    },
    unconfirmed=(
        "shift of the scheduler: in another copy, in stable-diffusion-webui-forge, it is fixed, and 1",
    ),
)
_BASE = replace(
    _HD,
    name="Chroma1 Base",
    hub_id="lodestones/Chroma1-Base",
    sources={**_HD.sources, "licence": LICENCES},
    unconfirmed=(*_HD.unconfirmed, "that its settings and dtypes are those of HD"),
)
CHROMA: tuple[Release, ...] = (_HD, _BASE)
