"""Small random text encoders of the real classes, fitting a given tokenizer."""

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from diffsynth_lite.testing.seeding import seeded

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
