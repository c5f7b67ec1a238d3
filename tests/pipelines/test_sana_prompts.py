"""Sana's prompts and negative prompts against diffusers' own pipeline."""

import inspect
from pathlib import Path

import pytest
import torch
from diffusers import SanaPipeline
from family_sample import CPU, PROMPTS

from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.sana import Sana, tiny

INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
LONG = "circle " * 400


@pytest.fixture(scope="module")
def pipeline() -> SanaPipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: SanaPipeline, tmp_path_factory: pytest.TempPathFactory) -> Sana:
    folder: Path = tmp_path_factory.mktemp("sana")
    pipeline.save_pretrained(folder)
    return Sana(PipelineFolder(path=folder))


def encoded(family: Sana, *prompts: Prompt) -> list[torch.Tensor]:
    encode = family.load_prompt_encoder(torch.float32, CPU)
    return [conditioning["prompt_embeds"] for conditioning in encode(prompts)]


@pytest.mark.parametrize("is_negative", [False, True])
@pytest.mark.parametrize("text", [*PROMPTS, "", "  An UPPER case Ring\n", LONG])
def test_a_prompt_is_encoded_as_by_the_pipeline(
    pipeline: SanaPipeline, family: Sana, text: str, is_negative: bool
) -> None:
    with torch.no_grad():
        embeds, mask, negative_embeds, negative_mask = pipeline.encode_prompt(
            text, negative_prompt=text, device=CPU, complex_human_instruction=INSTRUCTION
        )
    if is_negative:
        embeds, mask = negative_embeds, negative_mask
    (row,) = encoded(family, Prompt(text=text, is_negative=is_negative))
    assert embeds.shape == (1, 300, 16)
    assert len(row) == mask.sum() > 0
    assert torch.equal(row, embeds[0][mask[0].bool()])


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


def test_the_length_of_a_prompt_is_without_the_instruction_and_in_lower_case(
    pipeline: SanaPipeline, family: Sana
) -> None:
    text = "  An UPPER case Ring "
    lengths = family.prompt_lengths([text, text.lower().strip(), LONG, ""])
    assert lengths[0] == lengths[1] == len(pipeline.tokenizer("an upper case ring").input_ids)
    assert lengths[2] > family.max_prompt_tokens
    assert lengths[3] == 1  # the beginning of the text


def test_the_instruction_is_part_of_the_identity_of_the_prompt_encoder(
    family: Sana, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = family.prompt_encoder_id(torch.float32)
    assert all(line in before for line in INSTRUCTION)

    def another_call(self: SanaPipeline, complex_human_instruction: tuple[str, ...] = ("Draw",)) -> None:
        """The call of a diffusers with another instruction."""

    monkeypatch.setattr(SanaPipeline, "__call__", another_call)
    assert family.prompt_encoder_id(torch.float32) != before
