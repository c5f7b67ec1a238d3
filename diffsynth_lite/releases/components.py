"""This file has what several releases share: text encoders, autoencoders and tokenizers."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from diffsynth_lite.releases.release import ReleaseComponent, ReleaseTokenizer

FORGE = "stable-diffusion-webui-forge, backend/huggingface/"
"""A public repository of code that keeps the settings of some releases as their folders hold them."""
SDNEXT = "SD.Next, configs/"
"""Another one."""
MUSUBI = "musubi-tuner, src/musubi_tuner/"
"""A public trainer, which writes the settings of models out in its code."""
PINNED_INDEXES = "MoDiff, tests of modules/ModularDiffusers/loaders.py"
"""A public application, which writes out the ``model_index.json`` of some repositories, as of a commit."""
PINNED_FILES = "MoDiff, modiff/studio_execution_specs.py"
"""There the names of the files of some repositories, which show how many shards of at most 5 GB they have."""
LICENCES = "SceneWorks/inference, docs/licensing/sc-16665-checkpoint-licence-evidence.md"
"""There the licences that model cards declare, and which repositories are gated, as of 2026-08-02."""
SD_SCRIPTS = "kohya-ss/sd-scripts, library/"
"""Another one; the ids that it writes into LoRA files are those that other programs look for."""
SWARM = "SwarmUI, src/Text2Image/T2IModelClassSorter.cs"
"""A public interface, which lists the ids that it knows models by."""
ONE_TRAINER = "OneTrainer, resources/sd_model_spec/"
"""A public trainer, which keeps the ids that it writes."""
DIFFUSERS = "diffusers, "
"""Its repository: what is not under src/ is not in the package."""


def flow_euler(shift: float, source: str) -> ReleaseComponent:
    """A scheduler of flow matching whose shift is the same for all sizes."""
    return ReleaseComponent("FlowMatchEulerDiscreteScheduler", {"shift": shift}, source=source)


def encoder_sizes(
    width: int,
    inner_width: int,
    heads: int,
    layers: int,
    key_heads: int | None = None,
    words: int | None = None,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Settings of an encoder of texts or images; what is None is its class's default.

    Args:
        inner_width: of the feed-forward layers.
        key_heads: of keys and values, where several heads share them.
        words: of the vocabulary.
    """
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner_width,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": key_heads,
        "vocab_size": words,
        "head_dim": head_dim,
    }
    return {name: value for name, value in sizes.items() if value is not None}


T5_SHAPE = MappingProxyType({"d_kv": 64, "feed_forward_proj": "gated-gelu"})
_XXL = MappingProxyType({**T5_SHAPE, "d_ff": 10240, "d_model": 4096, "num_heads": 64, "num_layers": 24})
T5_XXL = ReleaseComponent(
    "T5EncoderModel",
    {**_XXL, "tie_word_embeddings": False, "vocab_size": 32128},
    dtype="bfloat16",
    num_bytes=9524621312,
    source=f"{FORGE}black-forest-labs/FLUX.1-dev/text_encoder_2",
)
T5_XXL_FP32 = replace(
    T5_XXL,
    dtype="float32",
    num_bytes=None,
    source=f"google/t5-v1_1-xxl, which {DIFFUSERS}scripts/convert_ltx_to_diffusers.py loads, by default in "
    f"float32; LTX-Video 0.9.8 has its four shards in {PINNED_FILES}",
)
CLIP_L = ReleaseComponent(
    "CLIPTextModel",
    {"projection_dim": 768, **encoder_sizes(768, 3072, 12, 12)},
    dtype="bfloat16",
    source=f"{FORGE}black-forest-labs/FLUX.1-dev/text_encoder",
)
CLIP_G = ReleaseComponent(
    "CLIPTextModelWithProjection",
    {"hidden_act": "gelu", "projection_dim": 1280, **encoder_sizes(1280, 5120, 20, 32)},
    source=f"{FORGE}stabilityai/stable-diffusion-3-medium-diffusers/text_encoder_2",
)
_UMT5 = f"google/umt5-xxl, as in {MUSUBI}wan/modules/t5.py"
UMT5_XXL = ReleaseComponent(
    "UMT5EncoderModel",
    {**_XXL, "vocab_size": 256384},
    dtype="bfloat16",
    source=f"{_UMT5}; three shards in {PINNED_FILES}",
)
UMT5_XXL_FP32 = replace(UMT5_XXL, dtype="float32", source=f"{_UMT5}; five shards in {PINNED_FILES}")
CLIP_VISION_H = ReleaseComponent(
    "CLIPVisionModelWithProjection",
    {"hidden_act": "gelu", "patch_size": 14, "projection_dim": 1024, **encoder_sizes(1280, 5120, 16, 32)},
    source=f"CLIP-ViT-H-14, which {DIFFUSERS}scripts/convert_wan_to_diffusers.py loads; its numbers as in "
    f"{MUSUBI}wan/modules/clip.py, its class as in {PINNED_INDEXES}",
)
KL_SHAPE = MappingProxyType(
    {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "layers_per_block": 2,
        "sample_size": 1024,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
)
"""Of the autoencoder of images in Stable Diffusion and FLUX.1."""
FLUX_VAE = ReleaseComponent(
    "AutoencoderKL",
    {
        **KL_SHAPE,
        "latent_channels": 16,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_post_quant_conv": False,
        "use_quant_conv": False,
    },
    dtype="bfloat16",
    source=f"{FORGE}black-forest-labs/FLUX.1-dev/vae; dtype from the bytes of the same one in Chroma1-HD: "
    "MoDiff, data/chroma1-hd-artifact-review.json",
)
WAN_VAE = ReleaseComponent(
    "AutoencoderKLWan",
    dtype="float32",
    source="defaults of the class; dtype from the bytes of the same one in SANA-Video: MoDiff, "
    "data/model-artifact-catalog.json",
)
QWEN_VAE = ReleaseComponent(
    "AutoencoderKLQwenImage", dtype="bfloat16", source="defaults of the class; dtype from memory"
)
FLUX2_VAE = ReleaseComponent(
    "AutoencoderKLFlux2",
    dtype="bfloat16",
    source=f"defaults of the class, as in {DIFFUSERS}scripts/convert_flux2_to_diffusers.py; dtype from the "
    "bytes of that of klein base 4B: MoDiff, data/flux2-klein-base-4b-artifact-review.json",
)
QWEN3_VL_8B = ReleaseComponent(
    "Qwen3VLModel",
    {
        "text_config": {"model_type": "qwen3_vl_text", **encoder_sizes(4096, 12288, 32, 36, 8, 151936, 128)},
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

FLUX_SCHEDULER = ReleaseComponent(
    "FlowMatchEulerDiscreteScheduler",
    {"shift": 3.0, "use_dynamic_shifting": True},
    source=f"{FORGE}black-forest-labs/FLUX.1-dev/scheduler",
)
QWEN3_4B = ReleaseComponent(
    "Qwen3ForCausalLM",
    {"tie_word_embeddings": True, **encoder_sizes(2560, 9728, 32, 36, 8, head_dim=128)},
    dtype="bfloat16",
    source=f"{MUSUBI}zimage/zimage_utils.py",
)
QWEN3_8B = replace(
    QWEN3_4B,
    config={"tie_word_embeddings": False, **encoder_sizes(4096, 12288, 32, 36, 8, head_dim=128)},
)
PIXTRAL = MappingProxyType(
    {
        "model_type": "pixtral",
        "image_size": 1540,
        "patch_size": 14,
        **encoder_sizes(1024, 4096, 16, 24, head_dim=64),
    }
)
"""What sees images in Mistral 3 and Ministral 3."""
MISTRAL3_24B = ReleaseComponent(
    "Mistral3ForConditionalGeneration",
    {
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
        "text_config": {"model_type": "mistral", **encoder_sizes(5120, 32768, 32, 40, 8, 131072, 128)},
        "vision_config": {**PIXTRAL},
    },
    dtype="bfloat16",
    source=f"{MUSUBI}flux_2/flux2_utils.py, with an output layer of its own, as 24B in its name counts it; "
    f"dtype as in {DIFFUSERS}scripts/convert_flux2_to_diffusers.py",
)

CLIP_TOKENIZER = ReleaseTokenizer("CLIPTokenizer", ("vocab.json", "merges.txt"))
T5_TOKENIZER_BOTH = ReleaseTokenizer("T5TokenizerFast", ("tokenizer.json", "spiece.model"))
QWEN2_TOKENIZER = ReleaseTokenizer("Qwen2TokenizerFast", ("tokenizer.json", "vocab.json", "merges.txt"))
T5_TOKENIZER_SLOW = ReleaseTokenizer("T5Tokenizer", ("spiece.model",))
