"""Qwen-Image and 2512, Qwen-Image-Edit, Edit-2509 and Edit-2511, and Qwen-Image-Layered."""

from dataclasses import replace

from diffsynth_lite.releases.components import LICENCES, MUSUBI, PINNED_INDEXES, QWEN_VAE
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_README = "QwenLM/Qwen-Image, README.md"
_TEXT_ENCODER = ReleaseComponent(
    class_name="Qwen2_5_VLForConditionalGeneration",
    config={
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
        "tie_word_embeddings": False,
    },
    dtype="bfloat16",
    source=f"{MUSUBI}qwen_image/qwen_image_utils.py",
)
_TRANSFORMER = ReleaseComponent(
    class_name="QwenImageTransformer2DModel",
    dtype="bfloat16",
    source="defaults of the class; dtype from the 57.7 GB of the repository of Edit-2511, as a public "
    "worker's manifest declares them",
)
_BASE = Release(
    name="Qwen-Image",
    hub_id="Qwen/Qwen-Image",
    pipeline_class="QwenImagePipeline",
    components={"transformer": _TRANSFORMER, "text_encoder": _TEXT_ENCODER, "vae": QWEN_VAE},
    scheduler=ReleaseComponent(
        class_name="FlowMatchEulerDiscreteScheduler",
        config={
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 8192,
            "max_shift": 0.9,
            "shift_terminal": 0.02,
            "use_dynamic_shifting": True,
        },
        source="ai-toolkit and SimpleTuner, public trainers, which write it out for this model",
    ),
    tokenizers={
        "tokenizer": ReleaseTokenizer(class_name="Qwen2Tokenizer", files=("vocab.json", "merges.txt"))
    },
    size=(1328, 1328, 1),
    parameters=20e9,
    licence="Apache-2.0",
    gated=None,
    architecture="Qwen-Image",
    version="qwen_image",
    sources={
        "pipeline": f"{PINNED_INDEXES}, for Edit",
        "size": f"{_README}, for 1:1",
        "parameters": _README,
        "licence": f"{_README}; {LICENCES}",
        "architecture": f"{MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
    },
    unconfirmed=("files of the tokenizer", "dtype of the autoencoder"),
)
_2512 = replace(
    _BASE,
    name="Qwen-Image-2512",
    hub_id="Qwen/Qwen-Image-2512",
    unconfirmed=(*_BASE.unconfirmed, "that its settings are those of Qwen-Image"),
)
QWEN_IMAGE: tuple[Release, ...] = (_BASE, _2512)

_EDIT = replace(
    _BASE,
    name="Qwen-Image-Edit",
    hub_id="Qwen/Qwen-Image-Edit",
    pipeline_class="QwenImageEditPipeline",
    tokenizers={
        **_BASE.tokenizers,
        "processor": ReleaseTokenizer(class_name="Qwen2VLProcessor"),
    },
    size=(1024, 1024, 1),
    architecture="Qwen-Image-Edit",
    version="qwen_image_edit",
    sources={
        **_BASE.sources,
        "size": "the area that the pipeline brings pictures to",
        "pipeline": PINNED_INDEXES,
    },
    unconfirmed=(*_BASE.unconfirmed, "settings of the scheduler"),
)
_EDIT_2509 = replace(
    _EDIT,
    name="Qwen-Image-Edit-2509",
    hub_id="Qwen/Qwen-Image-Edit-2509",
    pipeline_class="QwenImageEditPlusPipeline",
    architecture="Qwen-Image-Edit-Plus",
    sources={**_EDIT.sources, "pipeline": "diffusers, docs/source/en/api/pipelines/qwenimage.md"},
)
_EDIT_2511 = replace(
    _EDIT_2509,
    name="Qwen-Image-Edit-2511",
    hub_id="Qwen/Qwen-Image-Edit-2511",
    architecture="Qwen-Image-Edit-2511",
    components={
        **_EDIT.components,
        "transformer": replace(
            _TRANSFORMER,
            config={"zero_cond_t": True},
            source=f"{_TRANSFORMER.source}; `zero_cond_t` as in mflux, a public port",
        ),
    },
)
QWEN_IMAGE_EDIT: tuple[Release, ...] = (_EDIT, _EDIT_2509, _EDIT_2511)

_LAYERED = replace(
    _EDIT,
    name="Qwen-Image-Layered",
    hub_id="Qwen/Qwen-Image-Layered",
    pipeline_class="QwenImageLayeredPipeline",
    components={
        **_BASE.components,
        "transformer": replace(
            _TRANSFORMER,
            config={"use_additional_t_cond": True, "use_layer3d_rope": True},
            source=f"defaults of the class, with the two settings that {MUSUBI}qwen_image/"
            "qwen_image_model.py builds this model with; dtype as in Edit-2511",
        ),
        "vae": replace(
            QWEN_VAE,
            config={"input_channels": 4},
            source=f"{QWEN_VAE.source}; the channels as in {MUSUBI}qwen_image_cache_latents.py",
        ),
    },
    size=(640, 640, 5),
    architecture="Qwen-Image-Layered",
    version="qwen_image_layered",
    sources={
        **_EDIT.sources,
        "size": "the area that the pipeline brings pictures to, and one picture with four layers, by default",
        "pipeline": "diffusers, docs/source/en/api/pipelines/qwenimage.md",
    },
)
QWEN_IMAGE_LAYERED: tuple[Release, ...] = (_LAYERED,)
