"""SDXL base 1.0 and Turbo. Lightning and Hyper have no folders of their own: they are files for base."""

from dataclasses import replace

from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent

_XL_FOLDER = f"{known.FORGE}stabilityai/stable-diffusion-xl-base-1.0"
_XL_CATALOG = "MoDiff, data/model-artifact-catalog.json, which quotes its model card"
_XL_BETAS = {"beta_end": 0.012, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "steps_offset": 1}
_XL_DTYPE = "; dtype from memory"

_XL_BASE = Release(
    name="SDXL base 1.0",
    hub_id="stabilityai/stable-diffusion-xl-base-1.0",
    pipeline_class="StableDiffusionXLPipeline",
    components={
        "unet": ReleaseComponent(
            "UNet2DConditionModel",
            {
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
        "text_encoder": replace(
            known.CLIP_L, dtype="float32", source=f"{_XL_FOLDER}/text_encoder{_XL_DTYPE}"
        ),
        "text_encoder_2": replace(
            known.CLIP_G, dtype="float32", source=f"{_XL_FOLDER}/text_encoder_2{_XL_DTYPE}"
        ),
        "vae": ReleaseComponent(
            "AutoencoderKL",
            {**known.KL_SHAPE, "scaling_factor": 0.13025},
            dtype="float32",
            source=f"{_XL_FOLDER}/vae{_XL_DTYPE}",
        ),
    },
    scheduler=ReleaseComponent(
        "EulerDiscreteScheduler",
        {**_XL_BETAS, "timestep_spacing": "leading"},
        source=f"{_XL_FOLDER}/scheduler",
    ),
    tokenizers={"tokenizer": known.CLIP_TOKENIZER, "tokenizer_2": known.CLIP_TOKENIZER},
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
        "architecture": f"Stability-AI/ModelSpec, README.md; version, for all of SDXL: {known.SD_SCRIPTS}"
        "sdxl_model_util.py",
    },
    unconfirmed=("dtypes of the plain files",),
)
_XL_TURBO = _XL_BASE.but(
    "SDXL Turbo",
    "stabilityai/sdxl-turbo",
    scheduler=ReleaseComponent(
        "EulerAncestralDiscreteScheduler", {**_XL_BETAS, "timestep_spacing": "trailing"}, source="from memory"
    ),
    size=(512, 512, 1),
    licence="Stability AI Non-Commercial Research Community License",
    distilled="1 to 4 steps without guidance",
    architecture="stable-diffusion-xl-turbo-v1",
    sources={"pipeline": "as SDXL base", "size": "diffusers, docs/source/en/using-diffusers/sdxl_turbo.md"},
    unconfirmed=(*_XL_BASE.unconfirmed, "that its settings are those of base", "the scheduler"),
)
SDXL: tuple[Release, ...] = (_XL_BASE, _XL_TURBO)
