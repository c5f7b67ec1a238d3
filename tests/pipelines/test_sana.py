"""Sana against diffusers' own transformer and pipeline."""

import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import SanaPipeline
from family_sample import CPU, PROMPTS, encode_texts
from release_layouts import changed

from diffsynth_lite.core.gradient import GradientEngine, gradient_engine
from diffsynth_lite.core.noise.densities import shift_sigma
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest
from diffsynth_lite.pipelines.sana import Sana, model_fn_sana, tiny

FAMILY = "sana"


INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


LONG = "circle " * 400


@pytest.mark.parametrize("is_diffusers_flag_on", [False, True])
def test_one_setting_turns_checkpointing_on_for_a_fresh_transformer(is_diffusers_flag_on: bool) -> None:
    transformer = tiny().transformer
    transformer.gradient_checkpointing = is_diffusers_flag_on
    latents, timestep, embeds = torch.ones(1, 32, 4, 6), torch.tensor([500.0]), torch.ones(1, 3, 16)
    if is_diffusers_flag_on:  # by itself it calls a function that nobody has set
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            transformer(latents, embeds, timestep)
    for flags, num_recomputed in (((True, False), 2), ((False, True), 2), ((False, False), 0)):
        engine = GradientEngine()
        with gradient_engine(engine):
            velocity = model_fn_sana(
                transformer,
                latents,
                timestep,
                embeds,
                use_gradient_checkpointing=flags[0],
                use_gradient_checkpointing_offload=flags[1],
            )
        velocity.mean().backward()
        assert engine.report().blocks_recomputed == num_recomputed
        assert transformer.gradient_checkpointing == is_diffusers_flag_on


def test_the_samplers_noise_levels_are_an_even_grid_moved_by_the_shift(family: Sana) -> None:
    sampler = family.load_scheduler()
    sampler.set_timesteps(2)
    moved = shift_sigma(torch.tensor(0.5), family.family_shift((32, 32, 32)))
    assert sampler.sigmas[1].item() == pytest.approx(moved.item(), abs=1e-3)


@pytest.mark.parametrize("timestep_scale", [1.0, 0.001])
def test_the_model_gets_the_timestep_in_its_own_scale(timestep_scale: float, tmp_path: Path) -> None:
    changed(tiny(), timestep_scale=timestep_scale).save_pretrained(tmp_path)
    family = Sana(PipelineFolder(path=tmp_path))
    transformer = family.load_transformer(torch.float32)
    given: list[torch.Tensor] = []
    transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: given.append(kwargs["timestep"]), with_kwargs=True
    )
    (prompt,) = encode_texts(family, PROMPTS[0])
    settings = {"width": 128, "height": 64, "num_inference_steps": 3, "guidance_scale": 1.0, "seed": 3}
    request = PreviewRequest(conditioning=prompt, negative=prompt, **settings)
    scheduler = family.load_scheduler()
    scheduler.set_timesteps(3)
    with torch.no_grad():
        family.sample(transformer, torch.float32, [request])
        sampled = [timestep.item() for timestep in given]
        family.predict(
            transformer, torch.zeros(3, 32, 2, 4), scheduler.sigmas[:3], [request.conditioning] * 3
        )
    assert given[-1].tolist() == [
        pytest.approx(1000 * timestep_scale * sigma) for sigma in scheduler.sigmas[:3]
    ]
    # The sampler rounds to whole timesteps.
    assert sampled == [pytest.approx(level, abs=timestep_scale) for level in given[-1].tolist()]


def test_only_linear_layers_get_a_lora(family: Sana) -> None:
    transformer = family.empty_transformer()
    find = partial(find_target_layers, unused_modules=())
    found = find(transformer, family.default_target_modules)
    assert len(found) == 2 * 2 * 4  # blocks, attentions, layers
    assert all(isinstance(transformer.get_submodule(name), torch.nn.Linear) for name in found)
    with pytest.raises(ValueError, match=r"conv_point.* no linear layer"):
        find(transformer, ("to_q", "conv_point"))


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
