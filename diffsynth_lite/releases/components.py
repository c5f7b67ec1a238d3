"""This file has what several releases share: text encoders, autoencoders and tokenizers."""

from types import MappingProxyType

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

_T5_XXL = MappingProxyType(
    {
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "feed_forward_proj": "gated-gelu",
        "num_heads": 64,
        "num_layers": 24,
        "tie_word_embeddings": False,
        "vocab_size": 32128,
    }
)
T5_XXL = ReleaseComponent(
    "T5EncoderModel",
    _T5_XXL,
    dtype="bfloat16",
    num_bytes=9524621312,
    source=f"{FORGE}black-forest-labs/FLUX.1-dev/text_encoder_2",
)
T5_XXL_FP32 = ReleaseComponent(
    "T5EncoderModel",
    _T5_XXL,
    dtype="float32",
    source=f"google/t5-v1_1-xxl, which {DIFFUSERS}scripts/convert_ltx_to_diffusers.py loads, by default in "
    f"float32; LTX-Video 0.9.8 has its four shards in {PINNED_FILES}",
)
CLIP_L = ReleaseComponent(
    "CLIPTextModel",
    {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "projection_dim": 768,
    },
    dtype="bfloat16",
    source=f"{FORGE}black-forest-labs/FLUX.1-dev/text_encoder",
)
CLIP_G = ReleaseComponent(
    "CLIPTextModelWithProjection",
    {
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 20,
        "num_hidden_layers": 32,
        "projection_dim": 1280,
    },
    source=f"{FORGE}stabilityai/stable-diffusion-3-medium-diffusers/text_encoder_2",
)
_UMT5_XXL = MappingProxyType(
    {
        "d_ff": 10240,
        "d_kv": 64,
        "d_model": 4096,
        "feed_forward_proj": "gated-gelu",
        "num_heads": 64,
        "num_layers": 24,
        "vocab_size": 256384,
    }
)
UMT5_XXL_FP32 = ReleaseComponent(
    "UMT5EncoderModel",
    _UMT5_XXL,
    dtype="float32",
    source=f"google/umt5-xxl, as in {MUSUBI}wan/modules/t5.py; five shards in {PINNED_FILES}",
)
UMT5_XXL = ReleaseComponent(
    "UMT5EncoderModel",
    _UMT5_XXL,
    dtype="bfloat16",
    source=f"google/umt5-xxl, as in {MUSUBI}wan/modules/t5.py; three shards in {PINNED_FILES}",
)
CLIP_VISION_H = ReleaseComponent(
    "CLIPVisionModelWithProjection",
    {
        "hidden_act": "gelu",
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "patch_size": 14,
        "projection_dim": 1024,
    },
    source=f"CLIP-ViT-H-14, which {DIFFUSERS}scripts/convert_wan_to_diffusers.py loads; its numbers as in "
    f"{MUSUBI}wan/modules/clip.py, its class as in {PINNED_INDEXES}",
)
FLUX_VAE = ReleaseComponent(
    "AutoencoderKL",
    {
        "block_out_channels": (128, 256, 512, 512),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "latent_channels": 16,
        "layers_per_block": 2,
        "sample_size": 1024,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
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
FLUX_SCHEDULER = ReleaseComponent(
    "FlowMatchEulerDiscreteScheduler",
    {"shift": 3.0, "use_dynamic_shifting": True},
    source=f"{FORGE}black-forest-labs/FLUX.1-dev/scheduler",
)
_QWEN3 = MappingProxyType(
    {"head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8}
)
QWEN3_4B = ReleaseComponent(
    "Qwen3ForCausalLM",
    {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    dtype="bfloat16",
    source=f"{MUSUBI}zimage/zimage_utils.py",
)
QWEN3_8B = ReleaseComponent(
    "Qwen3ForCausalLM",
    {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    dtype="bfloat16",
    source=f"{MUSUBI}zimage/zimage_utils.py",
)
MISTRAL3_24B = ReleaseComponent(
    "Mistral3ForConditionalGeneration",
    {
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "mistral",
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
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
    source=f"{MUSUBI}flux_2/flux2_utils.py, with an output layer of its own, as 24B in its name counts it; "
    f"dtype as in {DIFFUSERS}scripts/convert_flux2_to_diffusers.py",
)

CLIP_TOKENIZER = ReleaseTokenizer("CLIPTokenizer", ("vocab.json", "merges.txt"))
T5_TOKENIZER_BOTH = ReleaseTokenizer("T5TokenizerFast", ("tokenizer.json", "spiece.model"))
QWEN2_TOKENIZER = ReleaseTokenizer("Qwen2TokenizerFast", ("tokenizer.json", "vocab.json", "merges.txt"))
T5_TOKENIZER_SLOW = ReleaseTokenizer("T5Tokenizer", ("spiece.model",))
