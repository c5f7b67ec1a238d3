"""Sana against diffusers' own transformer and pipeline."""

import inspect

import pytest
import torch
from diffusers import SanaPipeline
from family_sample import CPU, PROMPTS

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.sana import Sana

FAMILY = "sana"


INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


def encoded(family: Sana, *prompts: Prompt) -> list[torch.Tensor]:
    encode = family.load_prompt_encoder(torch.float32, CPU)
    return [conditioning["prompt_embeds"] for conditioning in encode(prompts)]


def test_prompts_and_negative_ones_of_one_batch_keep_their_order(
    pipeline: SanaPipeline, family: Sana
) -> None:
    prompts = [
        Prompt(text=text, is_negative=is_negative) for text in PROMPTS for is_negative in (True, False)
    ]
    with torch.no_grad():
        embeds, mask, negative_embeds, negative_mask = pipeline.encode_prompt(
            list(PROMPTS), negative_prompt=list(PROMPTS), device=CPU, complex_human_instruction=INSTRUCTION
        )
    expected = [
        row[kept.bool()]
        for place in range(len(PROMPTS))
        for row, kept in ((negative_embeds[place], negative_mask[place]), (embeds[place], mask[place]))
    ]
    rows = encoded(family, *prompts)
    assert len(rows) == len(expected) == 6
    for row, other in zip(rows, expected, strict=True):
        assert torch.equal(row, other)
    assert len({tuple(row.flatten().tolist()) for row in rows}) == 6


def test_the_instruction_is_part_of_the_identity_of_the_prompt_encoder(
    family: Sana, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = family.prompt_encoder_id(torch.float32)
    assert all(line in before for line in INSTRUCTION)

    def another_call(self: SanaPipeline, complex_human_instruction: tuple[str, ...] = ("Draw",)) -> None:
        """The call of a diffusers with another instruction."""

    monkeypatch.setattr(SanaPipeline, "__call__", another_call)
    assert family.prompt_encoder_id(torch.float32) != before
