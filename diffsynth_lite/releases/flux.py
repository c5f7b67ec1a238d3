"""FLUX.1: dev, Krea dev and schnell, Kontext dev, which edits, and Fill dev, which paints parts anew."""

from dataclasses import replace

from diffsynth_lite.releases.components import (
    CLIP_L,
    CLIP_TOKENIZER,
    FLUX_SCHEDULER,
    FLUX_VAE,
    FORGE,
    LICENCES,
    MUSUBI,
    PINNED_INDEXES,
    SD_SCRIPTS,
    SDNEXT,
    T5_TOKENIZER_BOTH,
    T5_XXL,
)
from diffsynth_lite.releases.release import Release, ReleaseComponent

_FOLDER = f"{FORGE}black-forest-labs/FLUX.1-dev"

_DEV = Release(
    name="FLUX.1 dev",
    hub_id="black-forest-labs/FLUX.1-dev",
    pipeline_class="FluxPipeline",
    components={
        "transformer": ReleaseComponent(
            class_name="FluxTransformer2DModel",
            config={"guidance_embeds": True},
            dtype="bfloat16",
            num_bytes=23802816640,
            source=f"{_FOLDER}/transformer",
        ),
        "text_encoder": CLIP_L,
        "text_encoder_2": T5_XXL,
        "vae": FLUX_VAE,
    },
    scheduler=FLUX_SCHEDULER,
    tokenizers={"tokenizer": CLIP_TOKENIZER, "tokenizer_2": T5_TOKENIZER_BOTH},
    size=(1024, 1024, 1),
    parameters=12e9,
    licence="FLUX.1 [dev] Non-Commercial License",
    gated=True,
    architecture="flux-1-dev",
    version="flux1",
    sources={
        "pipeline": f"{_FOLDER}; spiece.model: {SDNEXT}flux/tokenizer_2",
        "size": "`default_sample_size` of the pipeline",
        "parameters": "black-forest-labs/flux, model_cards/FLUX.1-dev.md",
        "licence": f"black-forest-labs/flux, README.md; gated: {LICENCES}",
        "architecture": f"{SD_SCRIPTS}sai_model_spec.py, flux_utils.py",
    },
)
_SCHNELL = replace(
    _DEV,
    name="FLUX.1 schnell",
    hub_id="black-forest-labs/FLUX.1-schnell",
    components={
        **_DEV.components,
        "transformer": ReleaseComponent(
            class_name="FluxTransformer2DModel",
            dtype="bfloat16",
            num_bytes=23782357120,
            source=f"{FORGE}black-forest-labs/FLUX.1-schnell/transformer",
        ),
    },
    scheduler=ReleaseComponent(
        class_name="FlowMatchEulerDiscreteScheduler",
        source=f"{FORGE}black-forest-labs/FLUX.1-schnell/scheduler",
    ),
    licence="Apache-2.0",
    gated=None,
    distilled="1 to 4 steps without guidance",
    architecture="flux-1-schnell",
    sources={
        **_DEV.sources,
        "pipeline": f"{FORGE}black-forest-labs/FLUX.1-schnell",
        "parameters": "black-forest-labs/flux, model_cards/FLUX.1-schnell.md",
    },
)
_KREA = replace(
    _DEV,
    name="FLUX.1 Krea dev",
    hub_id="black-forest-labs/FLUX.1-Krea-dev",
    sources={**_DEV.sources, "parameters": "black-forest-labs/flux, model_cards/FLUX.1-Krea-dev.md"},
    unconfirmed=("that its settings are those of FLUX.1 dev", "whether it is gated"),
)
FLUX: tuple[Release, ...] = (_DEV, _KREA, _SCHNELL)

FLUX_KONTEXT: tuple[Release, ...] = (
    replace(
        _DEV,
        name="FLUX.1 Kontext dev",
        hub_id="black-forest-labs/FLUX.1-Kontext-dev",
        pipeline_class="FluxKontextPipeline",
        version="flux_kontext",
        sources={
            **_DEV.sources,
            "pipeline": f"{PINNED_INDEXES}; settings as of FLUX.1 dev",
            "parameters": "black-forest-labs/flux, model_cards/FLUX.1-kontext-dev.md",
            "architecture": f"{MUSUBI}utils/sai_model_spec.py, which gives it that of FLUX.1 dev, and "
            "dataset/architectures.py",
        },
        unconfirmed=("that its settings are those of FLUX.1 dev", "whether it is gated"),
    ),
)

_FILL_SOURCE = "black-forest-labs/flux, src/flux/util.py, flux-dev-fill"
FLUX_FILL: tuple[Release, ...] = (
    replace(
        _DEV,
        name="FLUX.1 Fill dev",
        hub_id="black-forest-labs/FLUX.1-Fill-dev",
        pipeline_class="FluxFillPipeline",
        components={
            **_DEV.components,
            "transformer": ReleaseComponent(
                class_name="FluxTransformer2DModel",
                config={"in_channels": 384, "out_channels": 64, "guidance_embeds": True},
                dtype="bfloat16",
                source=f"{_FILL_SOURCE}; diffusers, loaders/single_file_utils.py, flux-fill",
            ),
        },
        version="flux1",
        sources={
            **_DEV.sources,
            "pipeline": f"{_FILL_SOURCE}; all else as of FLUX.1 dev",
            "parameters": "black-forest-labs/flux, model_cards/FLUX.1-tools.md",
        },
        unconfirmed=("that its other settings are those of FLUX.1 dev", "whether it is gated"),
    ),
)
