"""Lumina 2 against diffusers' own pipeline: what the tests of all families do not ask of it."""

import torch
from diffusers import Lumina2Pipeline
from family_sample import CPU, PROMPTS

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.lumina2 import Lumina2

FAMILY = "lumina2"


def test_prompts_and_negative_ones_of_one_batch_are_as_in_the_pipelines_call_and_keep_their_order(
    pipeline: Lumina2Pipeline, family: Lumina2
) -> None:
    prompts = [
        Prompt(text=text, is_negative=is_negative) for text in PROMPTS for is_negative in (True, False)
    ]
    with torch.no_grad():
        embeds, mask, negative_embeds, negative_mask = pipeline.encode_prompt(
            list(PROMPTS), negative_prompt=list(PROMPTS), device=CPU
        )
    expected = [
        row[kept.bool()]
        for place in range(len(PROMPTS))
        for row, kept in ((negative_embeds[place], negative_mask[place]), (embeds[place], mask[place]))
    ]
    rows = family.load_prompt_encoder(torch.float32, CPU)(prompts)
    assert len(rows) == len(expected) == 6
    for row, other in zip(rows, expected, strict=True):
        assert torch.equal(row["prompt_embeds"], other)
    assert len({len(row) for row in expected}) == 6


def test_another_system_prompt_is_another_identity_of_the_prompt_encoder(
    pipeline: Lumina2Pipeline, family: Lumina2
) -> None:
    assert pipeline.system_prompt in family.prompt_encoder_id(torch.float32)


def test_tokens_are_counted_as_the_model_makes_them_of_latents(
    pipeline: Lumina2Pipeline, family: Lumina2
) -> None:
    shape = family.latents_shape(64, 32, 1)
    no_prompt = torch.zeros(1, 1, dtype=torch.long)
    tokens_bld, *_ = pipeline.transformer.rope_embedder(torch.zeros(1, *shape), no_prompt)
    assert family.num_tokens(shape) == tokens_bld.shape[1] == 8
