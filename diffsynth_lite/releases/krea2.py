"""Krea 2 Raw and Turbo."""

from dataclasses import replace

from diffsynth_lite.releases.components import MUSUBI, QWEN_VAE
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_README = "krea-ai/krea-2, README.md"
_PIPELINE = "docstring of the pipeline in diffusers"
_TEXT_ENCODER = ReleaseComponent(
    class_name="Qwen3VLModel",
    config={
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 128,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 2560,
        },
        "tie_word_embeddings": True,
    },
    dtype="bfloat16",
    source=f"{MUSUBI}krea2/krea2_encoder.py: Qwen3-VL-4B-Instruct; class from the {_PIPELINE}, dtype of the "
    "original",
)
_RAW = Release(
    name="Krea 2 Raw",
    hub_id="krea/Krea-2-Raw",
    pipeline_class="Krea2Pipeline",
    settings={
        "is_distilled": False,
        "patch_size": 2,
        "text_encoder_select_layers": [2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35],
    },
    components={
        "transformer": ReleaseComponent(
            class_name="Krea2Transformer2DModel",
            source="SceneWorks/inference, crates/media/candle-gen/candle-gen-krea/src/config.rs, which has "
            "the file of Turbo and says that Raw shares it: the defaults of the class",
        ),
        "text_encoder": _TEXT_ENCODER,
        "vae": QWEN_VAE,
    },
    scheduler=ReleaseComponent(
        class_name="FlowMatchEulerDiscreteScheduler",
        config={
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 6400,
            "max_shift": 1.15,
            "use_dynamic_shifting": True,
        },
        source=_PIPELINE,
    ),
    tokenizers={"tokenizer": ReleaseTokenizer(class_name="Qwen2Tokenizer", files=("tokenizer.json",))},
    size=(1024, 1024, 1),
    parameters=12e9,
    licence="Krea 2 Community License",
    gated=True,
    architecture="Krea-2",
    version="krea2",
    sources={
        "pipeline": f"{_PIPELINE}, and its defaults",
        "size": _README,
        "parameters": "diffusers, examples/dreambooth/README_krea2.md",
        "licence": f"{_README}; gated as WebbDuck, a public interface, tells those without access",
        "architecture": f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
    },
    unconfirmed=("dtype of the transformer and of the autoencoder", "files of the tokenizer"),
)
_TURBO = replace(
    _RAW,
    name="Krea 2 Turbo",
    hub_id="krea/Krea-2-Turbo",
    settings={**_RAW.settings, "is_distilled": True},
    distilled="8 steps without guidance",
)
KREA2: tuple[Release, ...] = (_RAW, _TURBO)
