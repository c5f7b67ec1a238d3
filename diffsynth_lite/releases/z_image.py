"""Z-Image and Z-Image-Turbo."""

from dataclasses import replace

from diffsynth_lite.releases.components import FLUX_VAE, LICENCES, MUSUBI, QWEN3_4B
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_REPOSITORY = "Tongyi-MAI/Z-Image, "
_CONFIGS = "settings that public ports write out as those of Z-Image-Turbo, such as rullama's"


def _scheduler(shift: float, source: str) -> ReleaseComponent:
    return ReleaseComponent(
        class_name="FlowMatchEulerDiscreteScheduler", config={"shift": shift}, source=source
    )


_BASE = Release(
    name="Z-Image",
    hub_id="Tongyi-MAI/Z-Image",
    pipeline_class="ZImagePipeline",
    components={
        "transformer": ReleaseComponent(
            class_name="ZImageTransformer2DModel",
            source=f"{_REPOSITORY}src/config/model.py: the defaults of the class",
        ),
        "text_encoder": replace(QWEN3_4B, class_name="Qwen3Model", source=f"{QWEN3_4B.source}; {_CONFIGS}"),
        "vae": FLUX_VAE,
    },
    scheduler=_scheduler(6.0, "zml, a public runtime that names the file of this repository as its source"),
    tokenizers={"tokenizer": ReleaseTokenizer(class_name="Qwen2Tokenizer", files=("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=6e9,
    licence="Apache-2.0",
    gated=None,
    architecture="Z-Image",
    version="z_image",
    sources={
        "pipeline": f"{_REPOSITORY}src/config/manifests/z-image-turbo.txt; {_CONFIGS}",
        "size": "defaults of the pipeline",
        "parameters": f"{_REPOSITORY}README.md",
        "licence": LICENCES,
        "architecture": f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
    },
    unconfirmed=("dtype of the transformer", "files of the tokenizer"),
)
_TURBO = replace(
    _BASE,
    name="Z-Image-Turbo",
    hub_id="Tongyi-MAI/Z-Image-Turbo",
    components={
        **_BASE.components,
        "transformer": replace(
            _BASE.components["transformer"],
            dtype="float32",
            source=f"{_BASE.components['transformer'].source}; dtype from its three shards",
        ),
    },
    scheduler=_scheduler(3.0, f"{_REPOSITORY}src/config/model.py"),
    distilled="8 steps without guidance",
    unconfirmed=(),
)
Z_IMAGE: tuple[Release, ...] = (_BASE, _TURBO)
