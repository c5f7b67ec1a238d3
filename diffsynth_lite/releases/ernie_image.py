"""ERNIE-Image and ERNIE-Image-Turbo."""

from dataclasses import replace

from diffsynth_lite.releases.components import DIFFUSERS, FLUX2_VAE, SWARM
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_PORT = "dgrauet/ernie-image-mlx, a public port, CLAUDE.md and its files under model"
_BYTES = "MLX-Gen, its plan of a port of ERNIE-Image-Turbo"
_STUDIO = "DiffSynth-Studio, diffsynth/models/"
_MINISTRAL3_3B = ReleaseComponent(
    class_name="Mistral3Model",
    config={
        "spatial_merge_size": 2,
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "ministral3",
            "head_dim": 128,
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "num_attention_heads": 32,
            "num_hidden_layers": 26,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "vocab_size": 131072,
        },
        "vision_config": {
            "model_type": "pixtral",
            "head_dim": 64,
            "hidden_size": 1024,
            "image_size": 1540,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
        },
    },
    dtype="bfloat16",
    source=f"{_PORT}; {_STUDIO}ernie_image_text_encoder.py. The part that sees pictures, which is not used, "
    f"is that of Mistral 3 in FLUX.2: with it the numbers are those of the 7.17 GiB in {_BYTES}",
)
_BASE = Release(
    name="ERNIE-Image",
    hub_id="baidu/ERNIE-Image",
    pipeline_class="ErnieImagePipeline",
    components={
        "transformer": ReleaseComponent(
            class_name="ErnieImageTransformer2DModel",
            config={
                "ffn_hidden_size": 12288,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_layers": 36,
                "text_in_dim": 3072,
            },
            dtype="bfloat16",
            source=f"{_PORT}; {_STUDIO}ernie_image_dit.py; dtype from the bytes in {_BYTES}",
        ),
        "text_encoder": _MINISTRAL3_3B,
        "vae": replace(FLUX2_VAE, source=f"{_PORT}; dtype from the bytes in {_BYTES}"),
    },
    scheduler=ReleaseComponent(
        class_name="FlowMatchEulerDiscreteScheduler",
        config={"shift": 4.0},
        source="a fork of musubi-tuner, ernie_image_generate_image.py, of the file in the repository",
    ),
    tokenizers={"tokenizer": ReleaseTokenizer(class_name="TokenizersBackend", files=("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=8e9,
    licence="Apache-2.0",
    gated=None,
    architecture="ernie-image",
    version=None,
    sources={
        "pipeline": f"{_PORT}; files as a copy of the repository on the hub lists them "
        "(models123/ERNIE-Image); class of the tokenizer: MLX-Gen",
        "size": "defaults of the pipeline",
        "parameters": f"{DIFFUSERS}docs/source/en/api/pipelines/ernie_image.md",
        "licence": "the card of the model on the hub",
        "architecture": SWARM,
    },
    unconfirmed=("whether it is gated", "where the tokenizer cuts prompts"),
)
_TURBO = replace(
    _BASE,
    name="ERNIE-Image-Turbo",
    hub_id="baidu/ERNIE-Image-Turbo",
    distilled="8 steps without guidance",
    unconfirmed=(*_BASE.unconfirmed, "shift of the scheduler: 4 in MLX-Gen, 1 in modl's copy"),
)
ERNIE_IMAGE: tuple[Release, ...] = (_BASE, _TURBO)
