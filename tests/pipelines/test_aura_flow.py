"""AuraFlow against diffusers' own pipeline: what the tests of all families do not ask of it."""

from pathlib import Path

import pytest
import torch
from diffusers import AuraFlowPipeline
from family_sample import CPU, PROMPTS

from diffsynth_lite.config import Config
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import releases_of
from diffsynth_lite.pipelines.aura_flow import AuraFlow
from diffsynth_lite.pipelines.base.release_folder import write_release
from diffsynth_lite.training.data_settings import plan_rules

FAMILY = "aura_flow"


def test_zeros_after_a_prompt_are_not_kept_and_the_model_sees_as_many_as_in_the_pipeline(
    pipeline: AuraFlowPipeline, family: AuraFlow
) -> None:
    rows = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in PROMPTS])
    lengths = [len(row["prompt_embeds"]) for row in rows]
    assert lengths == family.prompt_lengths(PROMPTS)
    assert len(set(lengths)) == 3
    with torch.no_grad():
        expected, *_ = pipeline.encode_prompt(list(PROMPTS), device=CPU)
    given = family.model_inputs(rows, {"dtype": torch.float32, "device": CPU})
    assert torch.equal(given["prompt_embeds_bld"], expected)


@pytest.mark.parametrize("release", releases_of(FAMILY), ids=lambda release: release.name)
def test_a_release_reads_as_many_tokens_as_it_was_made_with_and_its_card_too(release, tmp_path: Path) -> None:
    family = AuraFlow(write_release(release, tmp_path))
    tokens, argument = {"AuraFlow v0.3": (256, {}), "Pony V7": (768, {"max_sequence_length": 768})}[
        release.name
    ]
    assert family.max_prompt_tokens == tokens
    assert family.usage_arguments(None) == argument  # type: ignore[arg-type]


def rules(family: AuraFlow, **data: object) -> None:
    required = {
        "model": {"family": FAMILY, "path": "m"},
        "output": {"dir": "o"},
        "data": {"path": "d", **data},
    }
    plan_rules(Config.model_validate(required), family)


def test_sizes_for_which_the_model_knows_no_places_are_refused(family: AuraFlow) -> None:
    family.check_size(128, 16, keys="size")
    with pytest.raises(UserError, match=r"size: 16x144; .* at most 128 pixels on each side"):
        family.check_size(16, 144, keys="size")
    rules(family, resolutions=[64, 90])
    rules(family, resolutions=[128], max_aspect_ratio=1)
    with pytest.raises(UserError, match=r"makes sides of 141 pixels.* set data.max_aspect_ratio: 1.63"):
        rules(family, resolutions=[64, 100])
    with pytest.raises(UserError, match=r"at most 128; set data.resolutions: \[128\]"):
        rules(family, resolutions=[130], max_aspect_ratio=1)


def test_tokens_are_counted_as_the_model_makes_them_of_latents(
    pipeline: AuraFlowPipeline, family: AuraFlow
) -> None:
    shape = family.latents_shape(64, 32, 1)
    tokens_bld = pipeline.transformer.pos_embed(torch.zeros(1, *shape))
    assert family.num_tokens(shape) == tokens_bld.shape[1] == 8


def test_the_autoencoder_is_not_for_float16(family: AuraFlow) -> None:
    with pytest.raises(UserError, match="float16 is too narrow"):
        family.check_vae_dtype(torch.float16)
