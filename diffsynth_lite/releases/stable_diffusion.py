"""Stable Diffusion 3 medium, 3.5 medium, large and large turbo, and XL base 1.0 and Turbo.

SDXL Lightning and Hyper have no folders of their own: they are files for base.
"""

from dataclasses import replace
from typing import Any

from diffsynth_lite.releases.components import (
    CLIP_L,
    CLIP_TOKENIZER,
    DIFFUSERS,
    FORGE,
    SD_SCRIPTS,
    T5_TOKENIZER_BOTH,
    T5_XXL,
)
from diffsynth_lite.releases.release import Release, ReleaseComponent

_FOLDER = f"{FORGE}stabilityai/stable-diffusion-3-medium-diffusers"
_PORT = "qds, a public port to MLX, which reads the files of the three repositories of 3.5"
_SCRIPT = f"{DIFFUSERS}scripts/convert_sd3_to_diffusers.py"


def _transformer(source: str, **config: Any) -> ReleaseComponent:
    shared = {"joint_attention_dim": 4096, "pooled_projection_dim": 2048}
    return ReleaseComponent(class_name="SD3Transformer2DModel", config=shared | config, source=source)


_OF_MEDIUM = {"caption_projection_dim": 1536, "num_attention_heads": 24, "num_layers": 24}
_MEDIUM_3 = Release(
    name="Stable Diffusion 3 medium",
    hub_id="stabilityai/stable-diffusion-3-medium-diffusers",
    pipeline_class="StableDiffusion3Pipeline",
    components={
        "transformer": _transformer(f"{_FOLDER}/transformer", **_OF_MEDIUM, pos_embed_max_size=192),
        "text_encoder": replace(
            CLIP_L,
            class_name="CLIPTextModelWithProjection",
            dtype=None,
            source=f"{_FOLDER}/text_encoder",
        ),
        "text_encoder_2": ReleaseComponent(
            class_name="CLIPTextModelWithProjection",
            config={
                "hidden_act": "gelu",
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_attention_heads": 20,
                "num_hidden_layers": 32,
                "projection_dim": 1280,
            },
            source=f"{_FOLDER}/text_encoder_2",
        ),
        "text_encoder_3": replace(
            T5_XXL, dtype="float16", source=f"{_FOLDER}/text_encoder_3, with its index"
        ),
        "vae": ReleaseComponent(
            class_name="AutoencoderKL",
            config={
                "block_out_channels": (128, 256, 512, 512),
                "down_block_types": ("DownEncoderBlock2D",) * 4,
                "latent_channels": 16,
                "layers_per_block": 2,
                "sample_size": 1024,
                "scaling_factor": 1.5305,
                "shift_factor": 0.0609,
                "up_block_types": ("UpDecoderBlock2D",) * 4,
                "use_post_quant_conv": False,
                "use_quant_conv": False,
            },
            source=f"{_FOLDER}/vae",
        ),
    },
    scheduler=ReleaseComponent(
        class_name="FlowMatchEulerDiscreteScheduler", config={"shift": 3.0}, source=f"{_FOLDER}/scheduler"
    ),
    tokenizers={
        "tokenizer": CLIP_TOKENIZER,
        "tokenizer_2": CLIP_TOKENIZER,
        "tokenizer_3": T5_TOKENIZER_BOTH,
    },
    size=(1024, 1024, 1),
    parameters=2e9,
    licence="Stability AI Community License",
    gated=True,
    architecture="stable-diffusion-3-medium",
    version="medium",
    sources={
        "pipeline": f"{_FOLDER}/model_index.json",
        "size": "`sample_size` of the transformer",
        "parameters": "2B in its files' names elsewhere, as sd_3_2b of OneTrainer",
        "licence": f"{_PORT}; gated: the page of SD3 in the documentation of diffusers",
        "architecture": f"{SD_SCRIPTS}sai_model_spec.py, sd3_utils.py; sd3_train_network.py",
    },
    unconfirmed=("dtype of the transformer, CLIP and autoencoder", "licence"),
)


def _of_3_5(name: str, parameters: float, transformer: ReleaseComponent) -> Release:
    size = "medium" if name == "medium" else "large"
    return replace(
        _MEDIUM_3,
        name=f"Stable Diffusion 3.5 {name}",
        hub_id=f"stabilityai/stable-diffusion-3.5-{name.replace(' ', '-')}",
        components={**_MEDIUM_3.components, "transformer": transformer},
        parameters=parameters,
        architecture=f"stable-diffusion-3-5-{size}",
        version=f"5-{size}",
        sources={
            **_MEDIUM_3.sources,
            "pipeline": f"that of 3 medium: {_FOLDER}/model_index.json; other settings: {_PORT}",
            "parameters": _PORT,
            "licence": _PORT,
        },
        unconfirmed=("dtype of the transformer, CLIP and autoencoder", "files of the tokenizers"),
    )


_MEDIUM = _of_3_5(
    "medium",
    2.5e9,
    _transformer(
        f"{_PORT}; {_SCRIPT}",
        **_OF_MEDIUM,
        dual_attention_layers=tuple(range(13)),
        pos_embed_max_size=384,
        qk_norm="rms_norm",
    ),
)
_LARGE = _of_3_5(
    "large",
    8.1e9,
    _transformer(
        f"{_PORT}; {_SCRIPT}",
        caption_projection_dim=2432,
        num_attention_heads=38,
        num_layers=38,
        pos_embed_max_size=192,
        qk_norm="rms_norm",
    ),
)
_LARGE_TURBO = replace(
    _LARGE,
    name="Stable Diffusion 3.5 large turbo",
    hub_id="stabilityai/stable-diffusion-3.5-large-turbo",
    distilled="4 steps without guidance",
)
SD3_RELEASES: tuple[Release, ...] = (_MEDIUM, _LARGE, _LARGE_TURBO, _MEDIUM_3)

_XL_FOLDER = f"{FORGE}stabilityai/stable-diffusion-xl-base-1.0"
_XL_CATALOG = "MoDiff, data/model-artifact-catalog.json, which quotes its model card"
_XL_BETAS = {"beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "steps_offset": 1}
_XL_DTYPE = "; dtype from memory"

_XL_BASE = Release(
    name="SDXL base 1.0",
    hub_id="stabilityai/stable-diffusion-xl-base-1.0",
    pipeline_class="StableDiffusionXLPipeline",
    components={
        "unet": ReleaseComponent(
            class_name="UNet2DConditionModel",
            config={
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "attention_head_dim": (5, 10, 20),
                "block_out_channels": (320, 640, 1280),
                "cross_attention_dim": 2048,
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                "projection_class_embeddings_input_dim": 2816,
                "sample_size": 128,
                "transformer_layers_per_block": (1, 2, 10),
                "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                "use_linear_projection": True,
            },
            dtype="float32",
            source=f"{_XL_FOLDER}/unet{_XL_DTYPE}",
        ),
        "text_encoder": replace(CLIP_L, dtype="float32", source=f"{_XL_FOLDER}/text_encoder{_XL_DTYPE}"),
        "text_encoder_2": ReleaseComponent(
            class_name="CLIPTextModelWithProjection",
            config={
                "hidden_act": "gelu",
                "hidden_size": 1280,
                "intermediate_size": 5120,
                "num_attention_heads": 20,
                "num_hidden_layers": 32,
                "projection_dim": 1280,
            },
            dtype="float32",
            source=f"{_XL_FOLDER}/text_encoder_2{_XL_DTYPE}",
        ),
        "vae": ReleaseComponent(
            class_name="AutoencoderKL",
            config={
                "block_out_channels": (128, 256, 512, 512),
                "down_block_types": ("DownEncoderBlock2D",) * 4,
                "layers_per_block": 2,
                "sample_size": 1024,
                "scaling_factor": 0.13025,
                "up_block_types": ("UpDecoderBlock2D",) * 4,
            },
            dtype="float32",
            source=f"{_XL_FOLDER}/vae{_XL_DTYPE}",
        ),
    },
    scheduler=ReleaseComponent(
        class_name="EulerDiscreteScheduler",
        config={**_XL_BETAS, "timestep_spacing": "leading"},
        source=f"{_XL_FOLDER}/scheduler",
    ),
    tokenizers={"tokenizer": CLIP_TOKENIZER, "tokenizer_2": CLIP_TOKENIZER},
    size=(1024, 1024, 1),
    parameters=2.6e9,
    variants=("fp16",),
    licence="CreativeML Open RAIL++-M",
    gated=None,
    architecture="stable-diffusion-xl-v1-base",
    version="sdxl_base_v1-0",
    sources={
        "pipeline": f"{_XL_FOLDER}; variant: diffusers, docs/source/en/using-diffusers/sdxl.md",
        "size": "its `sample_size`",
        "parameters": "arXiv 2307.01952, table 1",
        "licence": _XL_CATALOG,
        "architecture": f"Stability-AI/ModelSpec, README.md; version, for all of SDXL: {SD_SCRIPTS}"
        "sdxl_model_util.py",
    },
    unconfirmed=("dtypes of the plain files",),
)
_XL_TURBO = replace(
    _XL_BASE,
    name="SDXL Turbo",
    hub_id="stabilityai/sdxl-turbo",
    scheduler=ReleaseComponent(
        class_name="EulerAncestralDiscreteScheduler",
        config={**_XL_BETAS, "timestep_spacing": "trailing"},
        source="from memory",
    ),
    size=(512, 512, 1),
    licence="Stability AI Non-Commercial Research Community License",
    distilled="1 to 4 steps without guidance",
    architecture="stable-diffusion-xl-turbo-v1",
    sources={
        **_XL_BASE.sources,
        "pipeline": "as SDXL base",
        "size": "diffusers, docs/source/en/using-diffusers/sdxl_turbo.md",
    },
    unconfirmed=(*_XL_BASE.unconfirmed, "that its settings are those of base", "the scheduler"),
)
SDXL: tuple[Release, ...] = (_XL_BASE, _XL_TURBO)
