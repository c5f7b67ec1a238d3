"""Small random text encoders of the real classes, fitting a given tokenizer."""

from typing import Any

from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from diffsynth_lite.testing import seeded

HEAD_DIM = 16


def tiny_qwen2_5_vl(
    tokenizer: Qwen2Tokenizer, *, hidden_size: int = 16, num_layers: int = 2, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """A random Qwen2.5-VL in eval mode: the text encoder of the Qwen-Image pipelines.

    Args:
        tokenizer: gives the vocabulary size and the ids of the special tokens.
        hidden_size: width of the embeddings; a multiple of 16, the width of a head.
        num_layers: decoder layers of the language model; the vision tower always has 2 blocks of width 16.
        seed: of the weights; the global random state is left as it was.
    """
    num_heads = hidden_size // HEAD_DIM
    token_id = tokenizer.convert_tokens_to_ids
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "max_position_embeddings": tokenizer.model_max_length,
        # The rotary sections of time, height and width share half a head.
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 4], "rope_theta": 1e6},
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }
    vision_config = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": hidden_size,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text_config,
        vision_config=vision_config,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    with seeded(seed):
        return Qwen2_5_VLForConditionalGeneration(config).eval()


def tiny_qwen3(tokenizer: Qwen2Tokenizer, *, hidden_size: int = 16, seed: int = 0) -> Qwen3Model:
    """A random Qwen3 in eval mode with two layers: the text encoder of the Z-Image pipelines.

    Args:
        tokenizer: gives the vocabulary size and the ids of the special tokens.
        hidden_size: width of the embeddings; a multiple of 16, the width of a head.
        seed: of the weights; the global random state is left as it was.
    """
    with seeded(seed):
        return Qwen3Model(Qwen3Config(**_decoder_layout(tokenizer, hidden_size, num_layers=2))).eval()


def tiny_qwen3_lm(tokenizer: Qwen2Tokenizer, *, hidden_size: int = 16, seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 with its head, in eval mode: the text encoder of the FLUX.2 klein pipelines.

    It has 27 layers, because the pipelines take the embeddings behind layers 9, 18 and 27.

    Args:
        tokenizer: gives the vocabulary size and the ids of the special tokens.
        hidden_size: width of the embeddings; a multiple of 16, the width of a head.
        seed: of the weights; the global random state is left as it was.
    """
    with seeded(seed):
        return Qwen3ForCausalLM(Qwen3Config(**_decoder_layout(tokenizer, hidden_size, num_layers=27))).eval()


def tiny_mistral3(
    tokenizer: PreTrainedTokenizerFast, *, hidden_size: int = 16, seed: int = 0
) -> Mistral3ForConditionalGeneration:
    """A random Mistral 3 in eval mode: the text encoder of the FLUX.2 pipelines.

    It has 30 layers, because the pipelines take the embeddings behind layers 10, 20 and 30.

    Args:
        tokenizer: gives the vocabulary size and the ids of the special tokens.
        hidden_size: width of the embeddings; a multiple of 16, the width of a head.
        seed: of the weights; the global random state is left as it was.
    """
    vision_config = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Mistral3Config(
        text_config={"model_type": "mistral", **_decoder_layout(tokenizer, hidden_size, num_layers=30)},
        vision_config=vision_config,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )
    with seeded(seed):
        return Mistral3ForConditionalGeneration(config).eval()


def tiny_umt5(tokenizer: T5Tokenizer, *, hidden_size: int = 32, seed: int = 0) -> UMT5EncoderModel:
    """A random UMT5 encoder in eval mode with two layers: the text encoder of the Wan pipelines.

    Args:
        tokenizer: gives the vocabulary size.
        hidden_size: width of the embeddings; a multiple of 4, the number of heads.
        seed: of the weights; the global random state is left as it was.
    """
    with seeded(seed):
        return UMT5EncoderModel(UMT5Config(**_t5_layout(tokenizer, hidden_size))).eval()


def tiny_t5(tokenizer: T5Tokenizer, *, hidden_size: int = 32, seed: int = 0) -> T5EncoderModel:
    """A random T5 encoder in eval mode with two layers: of the LTX-Video pipelines, and one of FLUX.1's two.

    Args:
        tokenizer: gives the vocabulary size.
        hidden_size: width of the embeddings; a multiple of 4, the number of heads.
        seed: of the weights; the global random state is left as it was.
    """
    with seeded(seed):
        return T5EncoderModel(T5Config(**_t5_layout(tokenizer, hidden_size))).eval()


def tiny_clip_text(tokenizer: CLIPTokenizer, *, hidden_size: int = 32, seed: int = 0) -> CLIPTextModel:
    """A random CLIP text encoder in eval mode with two layers: the other one of the FLUX.1 pipelines.

    Args:
        tokenizer: gives the vocabulary size, the special tokens and the longest text.
        hidden_size: width of the embeddings; a multiple of 4, the number of heads.
        seed: of the weights; the global random state is left as it was.
    """
    with seeded(seed):
        return CLIPTextModel(_clip_text_config(tokenizer, hidden_size)).eval()


def tiny_clip_text_with_projection(
    tokenizer: CLIPTokenizer, *, hidden_size: int = 32, seed: int = 0
) -> CLIPTextModelWithProjection:
    """A random CLIP text encoder as ``tiny_clip_text``, with a projection: the second of the SDXL pipelines.

    Args:
        tokenizer: likewise.
        hidden_size: likewise; the projection is as wide.
        seed: likewise.
    """
    with seeded(seed):
        return CLIPTextModelWithProjection(_clip_text_config(tokenizer, hidden_size)).eval()


def _clip_text_config(tokenizer: CLIPTokenizer, hidden_size: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        projection_dim=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_gemma2(tokenizer: GemmaTokenizer, *, hidden_size: int = 16, seed: int = 0) -> Gemma2Model:
    """A random Gemma 2 in eval mode with two layers: the text encoder of the Sana pipelines.

    Args:
        tokenizer: gives the vocabulary size and the special tokens.
        hidden_size: width of the embeddings; a multiple of 4, the number of heads.
        seed: of the weights; the global random state is left as it was.
    """
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        query_pre_attn_scalar=hidden_size // 4,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with seeded(seed):
        return Gemma2Model(config).eval()


def _t5_layout(tokenizer: T5Tokenizer, hidden_size: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": hidden_size,
        "d_kv": hidden_size // 4,
        "d_ff": 2 * hidden_size,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "feed_forward_proj": "gated-gelu",
    }


def _decoder_layout(tokenizer: Any, hidden_size: int, *, num_layers: int) -> dict[str, Any]:
    num_heads = hidden_size // HEAD_DIM
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
