"""This file has what prompts are to HunyuanVideo 1.5: tokens of Qwen2.5-VL, and letters of words to write.

Layouts: b batch; l tokens, d channels.
Source: diffusers ``pipeline_hunyuan_video1_5.py``.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import format_text_input

from diffsynth_lite.pipelines.base.family import Conditioning
from diffsynth_lite.pipelines.base.model_function import mask_of, pad_tokens, without_padding

_DEFAULTS = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters
SYSTEM_MESSAGE: str = _DEFAULTS["system_message"].default
"""What the template puts before a prompt."""
_NUM_CUT: int = _DEFAULTS["crop_start"].default
"""Tokens of it, which are cut off."""


@torch.no_grad()
def encode_prompts(
    encoders: Mapping[str, Any],
    tokenizers: Sequence[Any],
    texts: Sequence[str],
    device: torch.device,
    *,
    max_tokens: int,
) -> list[Conditioning]:
    """Both kinds of embeddings of each text, (L, D), unpadded; one is empty where nothing is quoted."""
    # Without an autoencoder diffusers 0.42.1 makes no pipeline, whose encode_prompt calls these two.
    embeds = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        encoders["text_encoder"], tokenizers[0], list(texts), device, tokenizer_max_length=max_tokens
    )
    glyphs = HunyuanVideo15Pipeline._get_byt5_prompt_embeds(
        tokenizers[1], encoders["text_encoder_2"], list(texts), device
    )
    return [
        {"prompt_embeds": row_ld, "glyph_embeds": glyph_ld}
        for row_ld, glyph_ld in zip(without_padding(*embeds), without_padding(*glyphs), strict=True)
    ]


def num_tokens(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Tokens of each text, uncut, with the few that the template puts after it."""
    rows = tokenizer.apply_chat_template(
        format_text_input(list(texts), SYSTEM_MESSAGE),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
    )["input_ids"]
    return [len(row) - _NUM_CUT for row in rows]


def padded(
    conditioning: Sequence[Conditioning], name: str, like: Mapping[str, Any], *, length: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings (B, L, D) of a batch by their name, and their mask (B, L).

    Args:
        length: at least.
    """
    tokens_bld, mask = pad_tokens([sample[name] for sample in conditioning], length=length, **like)
    return tokens_bld, mask_of(tokens_bld, mask)


def prompt_arguments(prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A prompt as arguments of a pipeline."""
    arguments: dict[str, torch.Tensor] = {}
    for name, ending in (("prompt_embeds", ""), ("glyph_embeds", "_2")):
        tokens_bld, mask = padded([prompt], name, like, length=1)  # they take no empty tensor
        arguments |= {f"prompt_embeds{ending}": tokens_bld, f"prompt_embeds_mask{ending}": mask}
    return arguments
