"""Sana against diffusers' own transformer, autoencoder and pipeline."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
)
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags

from diffsynth_lite.core.gradient import GradientEngine, gradient_engine
from diffsynth_lite.core.noise import shift_sigma
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest, require_family
from diffsynth_lite.pipelines.sana import Sana, model_fn_sana, tiny

INSTRUCTION = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
LONG = "circle " * 400
# What the released transformers differ in, apart from their size.
LAYOUTS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "1.5": {"qk_norm": "rms_norm_across_heads"},
    "1.0 of 4096 pixels": {"interpolation_scale": 2.0, "sample_size": 128},
}


def saved(pipeline: SanaPipeline, folder: Path) -> Sana:
    pipeline.save_pretrained(folder)
    return Sana(PipelineFolder(path=folder))


def small_transformer(**settings: Any) -> SanaTransformer2DModel:
    torch.manual_seed(0)
    return SanaTransformer2DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        **settings,
    )


def variant(**parts: Any) -> SanaPipeline:
    return SanaPipeline(**tiny().components | parts)


@pytest.fixture(scope="module")
def pipeline() -> SanaPipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: SanaPipeline, tmp_path_factory: pytest.TempPathFactory) -> Sana:
    return saved(pipeline, tmp_path_factory.mktemp("sana"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_padded", [False, True])
def test_model_fn_equals_the_transformers_own_forward(layout: str, is_padded: bool) -> None:
    transformer = small_transformer(**LAYOUTS[layout])
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 32, 4, 6, generator=generator)
    embeds = torch.randn(2, 7, 16, generator=generator)
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3]) if is_padded else None
    timestep = torch.tensor([250.0, 800.0])
    reference = transformer(
        hidden_states=latents,
        encoder_hidden_states=embeds,
        timestep=timestep,
        encoder_attention_mask=mask,
        return_dict=False,
    )[0]
    expected = assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_sana,
        latents,
        timestep,
        embeds,
        mask,
    )
    # No layer of the last block is unused.
    assert all(gradient is not None for gradient in expected.values())


@pytest.mark.parametrize("is_diffusers_flag_on", [False, True])
def test_one_switch_turns_checkpointing_on_for_a_fresh_transformer(is_diffusers_flag_on: bool) -> None:
    transformer = small_transformer()
    transformer.gradient_checkpointing = is_diffusers_flag_on
    latents, timestep, embeds = torch.ones(1, 32, 4, 6), torch.tensor([500.0]), torch.ones(1, 3, 16)
    if is_diffusers_flag_on:  # alone it calls a function that nobody has set
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


@pytest.mark.parametrize(
    ("scheduler", "shift"),
    [
        (
            DPMSolverMultistepScheduler(
                use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=6.0
            ),
            6,
        ),
        (FlowMatchEulerDiscreteScheduler(shift=3.0), 3),
    ],
)
def test_the_shift_is_the_one_of_the_folders_sampler(
    scheduler: DPMSolverMultistepScheduler | FlowMatchEulerDiscreteScheduler, shift: float, tmp_path: Path
) -> None:
    family = saved(variant(scheduler=scheduler), tmp_path)
    assert family.family_shift((32, 32, 32)) == shift
    assert type(family.load_scheduler()) is type(scheduler)


def test_the_samplers_noise_levels_are_an_even_grid_moved_by_the_shift(family: Sana) -> None:
    sampler = family.load_scheduler()
    sampler.set_timesteps(2)
    moved = shift_sigma(torch.tensor(0.5), family.family_shift((32, 32, 32)))
    assert sampler.sigmas[1].item() == pytest.approx(moved.item(), abs=1e-3)


def request_of(family: Sana, **settings: Any) -> PreviewRequest:
    encode = family.load_prompt_encoder(torch.float32, CPU)
    conditioning, negative = encode([Prompt(text=PROMPTS[0]), Prompt(text="Blurred", is_negative=True)])
    return PreviewRequest(
        conditioning=conditioning,
        negative=negative,
        width=128,
        height=64,
        num_inference_steps=3,
        seed=3,
        **settings,
    )


@pytest.mark.parametrize("timestep_scale", [1.0, 0.001])
def test_the_model_is_told_the_timestep_in_its_own_scale(timestep_scale: float, tmp_path: Path) -> None:
    family = saved(variant(transformer=small_transformer(timestep_scale=timestep_scale)), tmp_path)
    transformer = family.load_transformer(torch.float32)
    told: list[torch.Tensor] = []
    transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: told.append(kwargs["timestep"]), with_kwargs=True
    )
    request = request_of(family, guidance_scale=1.0)
    scheduler = family.load_scheduler()
    scheduler.set_timesteps(3)
    with torch.no_grad():
        family.sample(transformer, torch.float32, [request])
        sampled = [timestep.item() for timestep in told]
        family.predict(
            transformer, torch.zeros(3, 32, 2, 4), scheduler.sigmas[:3], [request.conditioning] * 3
        )
    assert told[-1].tolist() == [
        pytest.approx(1000 * timestep_scale * sigma) for sigma in scheduler.sigmas[:3]
    ]
    # The sampler rounds to whole timesteps.
    assert sampled == [pytest.approx(level, abs=timestep_scale) for level in told[-1].tolist()]


def test_only_linear_layers_get_a_lora(family: Sana) -> None:
    transformer = family.empty_transformer()
    find = partial(find_target_layers, unused_modules=())
    found = find(transformer, family.default_target_modules)
    assert len(found) == 2 * 2 * 4  # blocks, attentions, layers
    assert all(isinstance(transformer.get_submodule(name), torch.nn.Linear) for name in found)
    with pytest.raises(ValueError, match=r"conv_point.* no linear layer"):
        find(transformer, ("to_q", "conv_point"))


def test_a_folder_of_sana_sprint_is_refused_by_name(tmp_path: Path) -> None:
    parts = tiny().components | {
        "transformer": small_transformer(guidance_embeds=True, timestep_scale=0.001),
        "scheduler": SCMScheduler(),
    }
    SanaSprintPipeline(**parts).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"holds a SanaSprintPipeline, but this family trains a SanaPipeline"):
        require_family(Sana, PipelineFolder(path=tmp_path))


def test_a_size_that_the_autoencoder_cannot_divide_is_refused_with_the_nearest(family: Sana) -> None:
    with pytest.raises(UserError, match="1000x1024 is not divisible by 32; the nearest size is 992x1024"):
        family.check_size(1000, 1024, keys="data.width, data.height")


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
