"""This file encodes prompts as the pipelines of the Wan models do.

Layouts: b batch, l tokens, d channels.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.base.diffusers_family import assemble
from diffsynth_lite.pipelines.base.family import Conditioning


def wan_prompt_encoder(
    tokenizer: Any, text_encoder: Any, *, max_tokens: int
) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
    """A function from prompts to their ``prompt_embeds``, (L, D) each: without the zeros behind a prompt.

    Args:
        tokenizer: of UMT5.
        text_encoder: a ``UMT5EncoderModel``.
        max_tokens: longer prompts are cut.
    """
    pipeline = assemble(WanPipeline, tokenizer=tokenizer, text_encoder=text_encoder)

    @torch.no_grad()
    def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
        texts = [prompt.text for prompt in prompts]
        embeds_bld, _ = pipeline.encode_prompt(
            texts,
            do_classifier_free_guidance=False,
            max_sequence_length=max_tokens,
            device=text_encoder.device,
        )
        # Past its tokens a row is zero; 512 rows of a short caption would fill the cache with nothing.
        return [
            {"prompt_embeds": row[:length].cpu().clone()}
            for row, length in zip(embeds_bld, num_prompt_tokens(tokenizer, texts), strict=True)
        ]

    return encode


def num_prompt_tokens(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Tokens of each text after the pipeline's cleaning, uncut."""
    return [len(tokens) for tokens in tokenizer([prompt_clean(text) for text in texts])["input_ids"]]


def wan_prompt_embeds(conditioning: Sequence[Conditioning], *, num_tokens: int) -> torch.Tensor:
    """(B, ``num_tokens``, D): as in the pipeline, the model attends to the zeros behind a prompt too."""
    rows = [sample["prompt_embeds"][:num_tokens] for sample in conditioning]
    embeds_bld = rows[0].new_zeros(len(rows), num_tokens, rows[0].shape[-1])
    for place, row in enumerate(rows):
        embeds_bld[place, : len(row)] = row
    return embeds_bld
