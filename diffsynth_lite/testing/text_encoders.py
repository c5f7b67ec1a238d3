"""Small random text encoders of the real classes, in eval mode.

``tokenizer`` gives the size of the vocabulary and the ids of the special tokens; ``seed`` is that of the
weights, and leaves the global random state as it was.
"""

from typing import Any

from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GemmaTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral3Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from diffsynth_lite.testing import seeded

_DECODER_WIDTH = 16  # that of one head
_ENCODER_WIDTH = 32


def tiny_qwen2_5_vl(
    tokenizer: Qwen2Tokenizer, *, hidden_size: int = _DECODER_WIDTH, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """A random Qwen2.5-VL with two layers and two of vision: the text encoder of the Qwen-Image pipelines.

    Args:
        hidden_size: width of the embeddings; a multiple of 16, the width of a head.
    """
    token_id = tokenizer.convert_tokens_to_ids
    text_config = _qwen2_5_vl_layout(tokenizer, hidden_size, num_layers=2)
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


def tiny_qwen2_5_vl_text(tokenizer: Qwen2Tokenizer, *, seed: int = 0) -> Qwen2_5_VLTextModel:
    """The random language model of a Qwen2.5-VL: a text encoder of the HunyuanVideo 1.5 pipelines.

    It has three layers, because the pipelines take the embeddings after the last layer but two.
    """
    config = Qwen2_5_VLTextConfig(**_qwen2_5_vl_layout(tokenizer, _DECODER_WIDTH, num_layers=3))
    with seeded(seed):
        return Qwen2_5_VLTextModel(config).eval()


def tiny_qwen3(tokenizer: Qwen2Tokenizer, *, seed: int = 0) -> Qwen3Model:
    """A random Qwen3 with two layers: the text encoder of the Z-Image pipelines."""
    with seeded(seed):
        return Qwen3Model(Qwen3Config(**_decoder_layout(tokenizer, num_layers=2))).eval()


def tiny_qwen3_lm(tokenizer: Qwen2Tokenizer, *, seed: int = 0) -> Qwen3ForCausalLM:
    """A random Qwen3 with its head,: the text encoder of the FLUX.2 klein pipelines.

    It has 27 layers, because the pipelines take the embeddings after layers 9, 18 and 27.
    """
    with seeded(seed):
        return Qwen3ForCausalLM(Qwen3Config(**_decoder_layout(tokenizer, num_layers=27))).eval()


def tiny_qwen3_vl(tokenizer: Qwen2Tokenizer, *, num_layers: int = 2, seed: int = 0) -> Qwen3VLModel:
    """A random Qwen3-VL with one layer of vision: the text encoder of the Krea 2 pipelines."""
    with seeded(seed):
        return Qwen3VLModel(_qwen3_vl_config(tokenizer, num_layers)).eval()


def tiny_qwen3_vl_lm(
    tokenizer: Qwen2Tokenizer, *, num_layers: int = 2, seed: int = 0
) -> Qwen3VLForConditionalGeneration:
    """The same with its head: the text encoder of the Qwen-Image 2.1 and FLUX.3 pipelines."""
    with seeded(seed):
        return Qwen3VLForConditionalGeneration(_qwen3_vl_config(tokenizer, num_layers)).eval()


def _qwen3_vl_config(tokenizer: Qwen2Tokenizer, num_layers: int) -> Qwen3VLConfig:
    token_id = tokenizer.convert_tokens_to_ids
    # The rotary sections of time, height and width share half a head.
    rotary = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 5e6}
    return Qwen3VLConfig(
        text_config={**_decoder_layout(tokenizer, num_layers=num_layers), "rope_parameters": rotary},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": _DECODER_WIDTH,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )


def tiny_llama(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> LlamaModel:
    """A random Llama: a text encoder of the HunyuanVideo pipelines.

    It has three layers, because the pipelines take the embeddings after the last layer but two.
    """
    with seeded(seed):
        return LlamaModel(LlamaConfig(**_decoder_layout(tokenizer, num_layers=3))).eval()


def tiny_llava(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> LlavaForConditionalGeneration:
    """A random LLaVA: the text encoder of HunyuanVideo's pipeline for images, as ``tiny_llama`` of the other.

    Of an image of 48 x 48 pixels it makes 576 tokens, which the pipeline counts.
    """
    config = LlavaConfig(
        text_config={"model_type": "llama", **_decoder_layout(tokenizer, num_layers=3)},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 48,
            "patch_size": 2,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    with seeded(seed):
        return LlavaForConditionalGeneration(config).eval()


def tiny_llama_lm(tokenizer: PreTrainedTokenizerFast, *, num_layers: int, seed: int = 0) -> LlamaForCausalLM:
    """A random Llama with its head: a text encoder of the HiDream-I1 pipelines."""
    with seeded(seed):
        return LlamaForCausalLM(LlamaConfig(**_decoder_layout(tokenizer, num_layers=num_layers))).eval()


def tiny_mistral3(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Mistral3ForConditionalGeneration:
    """A random Mistral 3: the text encoder of the FLUX.2 pipelines.

    It has 30 layers, because the pipelines take the embeddings after layers 10, 20 and 30.
    """
    layout = {"model_type": "mistral", **_decoder_layout(tokenizer, num_layers=30)}
    with seeded(seed):
        return Mistral3ForConditionalGeneration(_mistral3_config(tokenizer, layout)).eval()


def tiny_ministral3(tokenizer: PreTrainedTokenizerFast, *, seed: int = 0) -> Mistral3Model:
    """A random Ministral 3 with two layers and no head: the text encoder of the ERNIE-Image pipelines."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
    }
    layout = {
        "model_type": "ministral3",
        **_decoder_layout(tokenizer, num_layers=2),
        "max_position_embeddings": 262144,
        "rope_parameters": rope,
    }
    with seeded(seed):
        return Mistral3Model(_mistral3_config(tokenizer, layout)).eval()


def _mistral3_config(tokenizer: PreTrainedTokenizerFast, text_config: dict[str, Any]) -> Mistral3Config:
    vision_config = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    return Mistral3Config(
        text_config=text_config,
        vision_config=vision_config,
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
    )


def tiny_umt5(
    tokenizer: T5Tokenizer, *, hidden_size: int = _ENCODER_WIDTH, seed: int = 0
) -> UMT5EncoderModel:
    """A random UMT5 encoder with two layers: the text encoder of the Wan pipelines.

    Args:
        hidden_size: width of the embeddings; a multiple of 4, the number of heads.
    """
    with seeded(seed):
        return UMT5EncoderModel(UMT5Config(**_t5_layout(tokenizer, hidden_size))).eval()


def tiny_t5(
    tokenizer: T5Tokenizer | ByT5Tokenizer, *, hidden_size: int = _ENCODER_WIDTH, seed: int = 0
) -> T5EncoderModel:
    """A random T5 encoder with two layers: of LTX-Video, and one of FLUX.1's and HunyuanVideo 1.5's two.

    Args:
        hidden_size: width of the embeddings; a multiple of 4, the number of heads.
    """
    with seeded(seed):
        return T5EncoderModel(T5Config(**_t5_layout(tokenizer, hidden_size))).eval()


def tiny_clip_text(tokenizer: CLIPTokenizer, *, seed: int = 0) -> CLIPTextModel:
    """A random CLIP text encoder with two layers: the other one of the FLUX.1 pipelines."""
    with seeded(seed):
        return CLIPTextModel(_clip_text_config(tokenizer)).eval()


def tiny_clip_text_with_projection(tokenizer: CLIPTokenizer, *, seed: int = 0) -> CLIPTextModelWithProjection:
    """As ``tiny_clip_text``, with a projection: the second text encoder of the SDXL pipelines."""
    with seeded(seed):
        return CLIPTextModelWithProjection(_clip_text_config(tokenizer)).eval()


def _clip_text_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=_ENCODER_WIDTH,
        intermediate_size=2 * _ENCODER_WIDTH,
        projection_dim=_ENCODER_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_gemma2(tokenizer: GemmaTokenizer, *, seed: int = 0) -> Gemma2Model:
    """A random Gemma 2 with two layers: the text encoder of the Sana pipelines."""
    config = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=_DECODER_WIDTH,
        intermediate_size=2 * _DECODER_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=_DECODER_WIDTH // 4,
        query_pre_attn_scalar=_DECODER_WIDTH // 4,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with seeded(seed):
        return Gemma2Model(config).eval()


def tiny_gemma3(tokenizer: GemmaTokenizer, *, seed: int = 0) -> Gemma3ForConditionalGeneration:
    """A random Gemma 3 with two layers, of either kind, and one of vision: of the LTX-2 pipelines."""
    config = Gemma3Config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _DECODER_WIDTH,
            "intermediate_size": 2 * _DECODER_WIDTH,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": _DECODER_WIDTH // 2,
            "query_pre_attn_scalar": _DECODER_WIDTH // 2,
            "sliding_window": 1024,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=1,
    )
    with seeded(seed):
        return Gemma3ForConditionalGeneration(config).eval()


def _qwen2_5_vl_layout(tokenizer: Qwen2Tokenizer, hidden_size: int, *, num_layers: int) -> dict[str, Any]:
    num_heads = hidden_size // _DECODER_WIDTH
    token_id = tokenizer.convert_tokens_to_ids
    return {
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


def _t5_layout(tokenizer: T5Tokenizer | ByT5Tokenizer, hidden_size: int) -> dict[str, Any]:
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


def _decoder_layout(tokenizer: Any, *, num_layers: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": _DECODER_WIDTH,
        "intermediate_size": 2 * _DECODER_WIDTH,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": _DECODER_WIDTH,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
