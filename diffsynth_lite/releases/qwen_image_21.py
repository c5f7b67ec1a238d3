"""Qwen-Image 2.1."""

from dataclasses import replace

from diffsynth_lite.releases.components import MUSUBI
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer

_README = "QwenLM/Qwen-Image-2.1, README.md"
_NOTES = "libwaifu, a public runtime, notes on Qwen-Image 2.1 from the published files"
_FIZGIG = "Fizgig, a public trainer, src/fizgig/families/qwen_image.py"
QWEN3_VL_8B = ReleaseComponent(
    class_name="Qwen3VLModel",
    config={
        "text_config": {
            "model_type": "qwen3_vl_text",
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
        },
        "tie_word_embeddings": False,
    },
    dtype="bfloat16",
    source=f"{MUSUBI}ideogram4/ideogram4_utils.py: Qwen3-VL-8B-Instruct",
)
QWEN3_VL_8B_LM = replace(
    QWEN3_VL_8B,
    class_name="Qwen3VLForConditionalGeneration",
    source=f"{_NOTES}; settings as in {QWEN3_VL_8B.source}; dtype from the 17.5 GB of its files",
)
QWEN_IMAGE_21: tuple[Release, ...] = (
    Release(
        name="Qwen-Image 2.1",
        hub_id="Qwen/Qwen-Image-2.1",
        pipeline_class="QwenImage21Pipeline",
        components={
            "transformer": ReleaseComponent(
                class_name="QwenImage21Transformer2DModel",
                dtype="bfloat16",
                source=f"{_NOTES}: the defaults of the class, in two shards in bfloat16",
            ),
            "text_encoder": QWEN3_VL_8B_LM,
            "vae": ReleaseComponent(
                class_name="AutoencoderKLQwenImage21",
                dtype="float32",
                source=f"{_NOTES}: the defaults of the class; dtype from the 1.35 GB in {_FIZGIG}",
            ),
        },
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
            source=_NOTES,
        ),
        tokenizers={"processor": ReleaseTokenizer(class_name="Qwen3VLProcessor", files=("tokenizer.json",))},
        size=(2048, 2048, 1),
        parameters=7e9,
        licence="Qwen Research License",
        gated=False,
        architecture="Qwen-Image-2.1",
        version="qwenimage21",
        sources={
            "pipeline": "docstring of the pipeline in diffusers",
            "size": _README,
            "parameters": _README,
            "licence": _NOTES,
            "architecture": f"{_FIZGIG}: `modelspec_arch` and `arch_id`",
        },
    ),
)
