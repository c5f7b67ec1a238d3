"""This file makes of prompts what the two streams of LTX-2 read: the outputs of its connectors.

Layouts: b batch, l tokens, d channels.
Sources: diffusers ``pipeline_ltx2.py`` and ``connectors.py`` of its folder.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import LTX2Pipeline

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.base.diffusers_family import assemble
from diffsynth_lite.pipelines.base.family import Conditioning

STREAMS = ("prompt_embeds", "audio_prompt_embeds")
"""Names of what the stream of the clip and that of its audio read of a prompt."""


def prompt_encoder(
    text_encoder: Any, tokenizer: Any, connectors: Any, device: torch.device, *, max_tokens: int
) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
    """A function from prompts to what each stream reads of them, (L, D) in the dtype of the connectors.

    The pipeline hands its connectors all layers of the text encoder: of 1024 tokens 188,160 numbers each, 50
    times what they make of them. They put registers in the place of padding and mix these with the words, so
    that of theirs nothing may be left out.
    """
    # Without its head, whose logits nobody reads: 262,208 for each token.
    pipeline = assemble(LTX2Pipeline, text_encoder=text_encoder.model, tokenizer=tokenizer)

    @torch.no_grad()
    def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
        return [encode_one(prompt.text) for prompt in prompts]

    def encode_one(text: str) -> Conditioning:
        layers_bld, mask, _, _ = pipeline.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=max_tokens, device=device
        )
        *streams_bld, _ = connectors(layers_bld, mask, padding_side=tokenizer.padding_side)
        return {name: stream_bld[0].cpu() for name, stream_bld in zip(STREAMS, streams_bld, strict=True)}

    return encode
