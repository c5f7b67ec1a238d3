"""FLUX.1 against diffusers' own transformer, autoencoder and pipeline."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags, transformer_calls

from diffsynth_lite.core.gradient import blocks_of
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, PreviewRequest, require_family
from diffsynth_lite.pipelines.flux import Flux, model_fn_flux, tiny


def saved(pipeline: FluxPipeline, folder: Path) -> Flux:
    pipeline.save_pretrained(folder)
    return Flux(PipelineFolder(path=folder))


def small_transformer(*, is_guided: bool) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=is_guided,
        axes_dims_rope=(4, 6, 6),
    )


def schnell() -> FluxPipeline:
    """The layout of schnell: no guidance scale, no shift."""
    parts = tiny().components | {
        "transformer": small_transformer(is_guided=False),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=1.0),
    }
    return FluxPipeline(**parts)


@pytest.fixture(scope="module")
def pipeline() -> FluxPipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: FluxPipeline, tmp_path_factory: pytest.TempPathFactory) -> Flux:
    return saved(pipeline, tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def schnell_family(tmp_path_factory: pytest.TempPathFactory) -> Flux:
    return saved(schnell(), tmp_path_factory.mktemp("schnell"))


def encoded_prompts(family: Flux, *texts: str) -> list[dict[str, torch.Tensor]]:
    return family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])


def tokens_and_positions(latents: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """2 x 2 patches in reading order, written out instead of through diffusers."""
    batch, channels, height, width = latents.shape
    patches = latents.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5)
    positions = [[place, row, column] for row in range(height // 2) for column in range(width // 2)]
    return patches.reshape(batch, -1, channels * 4), torch.tensor(positions, dtype=torch.float32)


@pytest.mark.parametrize("is_guided", [False, True])
@pytest.mark.parametrize("edits", [False, True])
def test_model_fn_equals_the_transformers_own_forward(is_guided: bool, edits: bool) -> None:
    transformer = small_transformer(is_guided=is_guided)
    generator = torch.Generator().manual_seed(0)
    noisy = torch.randn(2, 16, 8, 4, generator=generator)
    inputs = torch.randn(2, 16, 6, 10, generator=generator) if edits else None
    embeds = torch.randn(2, 7, 32, generator=generator)
    pooled = torch.randn(2, 32, generator=generator)
    sigma = torch.tensor([0.2, 0.7])
    guidance = torch.tensor([1.0, 3.5]) if is_guided else None

    pictures = [noisy] if inputs is None else [noisy, inputs]
    tokens, positions = zip(*map(tokens_and_positions, pictures, range(2)), strict=True)
    reference = transformer(
        hidden_states=torch.cat(tokens, dim=1),
        timestep=sigma,
        guidance=guidance,
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(7, 3),
        img_ids=torch.cat(positions),
        return_dict=False,
    )[0][:, : 4 * 2]
    reference = FluxPipeline._unpack_latents(reference, 8 * 8, 4 * 8, vae_scale_factor=8)
    expected = assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_flux,
        noisy,
        sigma,
        embeds,
        pooled,
        guidance,
        input_latents_bchw=inputs,
    )
    # No layer of the last block is unused.
    assert all(gradient is not None for gradient in expected.values())


def test_the_blocks_run_in_the_order_in_which_they_are_declared(family: Flux) -> None:
    transformer = family.load_transformer(torch.float32)
    run: list[torch.nn.Module] = []
    declared = blocks_of(transformer, family.block_lists)
    for block in transformer.modules():
        if type(block).__name__ in transformer._repeated_blocks:
            block.register_forward_pre_hook(lambda module, _args: run.append(module))
    with torch.no_grad():
        family.predict(
            transformer, torch.zeros(1, 16, 4, 8), torch.ones(1), encoded_prompts(family, "a ring")
        )
    assert [type(block).__name__ for block in run] == [
        *["FluxTransformerBlock"] * 2,
        *["FluxSingleTransformerBlock"] * 2,
    ]
    assert all(block is other for block, other in zip(run, declared, strict=True))


def test_prompts_are_encoded_as_by_the_pipeline(pipeline: FluxPipeline, family: Flux) -> None:
    texts = [*PROMPTS, "", "circle " * 200]
    encoded = encoded_prompts(family, *texts)
    with torch.no_grad():
        embeds, pooled, _ = pipeline.encode_prompt(texts, device=CPU)
    assert torch.equal(torch.stack([row["prompt_embeds"] for row in encoded]), embeds)
    assert torch.equal(torch.stack([row["pooled_prompt_embeds"] for row in encoded]), pooled)
    assert embeds.shape == (5, 512, 32)
    lengths = family.prompt_lengths(texts)
    assert lengths[3] == 1  # the end of the text
    assert lengths[4] > family.max_prompt_tokens


def test_prompts_of_schnell_are_padded_to_256_tokens(pipeline: FluxPipeline, schnell_family: Flux) -> None:
    texts = [*PROMPTS, "circle " * 200]
    encoded = encoded_prompts(schnell_family, *texts)
    with torch.no_grad():
        embeds, _, _ = pipeline.encode_prompt(texts, device=CPU, max_sequence_length=256)
    assert torch.equal(torch.stack([row["prompt_embeds"] for row in encoded]), embeds)
    assert embeds.shape == (4, 256, 32)
    assert schnell_family.max_prompt_tokens == 256
    assert schnell_family.prompt_lengths(texts)[3] > 256


def test_schnell_is_told_no_guidance_scale(schnell_family: Flux) -> None:
    transformer = schnell_family.load_transformer(torch.float32)
    batch = torch.zeros(1, 16, 4, 8), torch.ones(1), encoded_prompts(schnell_family, "a ring")
    (call,) = transformer_calls(transformer, lambda: schnell_family.predict(transformer, *batch))
    assert call["guidance"] is None


def test_dev_is_told_no_guidance_in_training_or_that_of_its_target(family: Flux) -> None:
    told = Flux(family.folder)
    transformer = told.load_transformer(torch.float32)
    batch = torch.zeros(1, 16, 4, 8), torch.ones(1), encoded_prompts(told, "a ring")
    for scale in (1.0, 3.5):
        told.training_guidance = scale
        (call,) = transformer_calls(transformer, lambda: told.predict(transformer, *batch))
        assert call["guidance"].tolist() == [scale]


def test_the_shift_is_the_one_of_the_folders_sampler(family: Flux, schnell_family: Flux) -> None:
    for width, height in ((256, 256), (1024, 1024), (1344, 768)):
        shape = family.latents_shape(width, height, 1)
        mu = calculate_shift(width * height // 16**2)
        assert family.family_shift(shape) == pytest.approx(math.exp(mu))
        assert schnell_family.family_shift(shape) == 1.0
    assert family.family_shift(family.latents_shape(1024, 1024, 1)) == pytest.approx(math.exp(1.15))


def test_schnell_is_known_for_distilled_by_its_files_and_what_is_made_of_dev_is_not(
    family: Flux, schnell_family: Flux, tmp_path: Path
) -> None:
    assert schnell_family.distilled is not None
    assert "FLUX.1 schnell; better train FLUX.1 dev" in schnell_family.distilled
    assert (family.distilled, family.max_prompt_tokens) == (None, 512)
    undone = saved(
        FluxPipeline(**tiny().components | {"transformer": small_transformer(is_guided=False)}), tmp_path
    )
    assert (undone.distilled, undone.max_prompt_tokens) == (None, 512)


@pytest.mark.parametrize(
    ("scale", "theirs"), [(1.0, {}), (2.0, {"true_cfg_scale": 2.0, "negative_prompt": "blurred"})]
)
def test_a_preview_of_schnell_is_what_the_pipeline_draws_from_the_text(
    scale: float, theirs: dict[str, Any], schnell_family: Flux
) -> None:
    pipeline = FluxPipeline.from_pretrained(schnell_family.folder.path)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline(
        PROMPTS[0],
        width=64,
        height=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(3),
        max_sequence_length=256,
        **theirs,
    ).images[0]
    conditioning, negative = encoded_prompts(schnell_family, PROMPTS[0], "blurred")
    request = PreviewRequest(
        conditioning=conditioning,
        negative=negative,
        width=64,
        height=32,
        num_inference_steps=2,
        guidance_scale=scale,
        seed=3,
    )
    transformer = schnell_family.load_transformer(torch.float32)
    ((drawn,),) = schnell_family.sample(transformer, torch.float32, [request])
    assert drawn.tobytes() == expected.tobytes()


def test_a_folder_of_kontext_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    FluxKontextPipeline(**tiny().components).save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"holds a FluxKontextPipeline, but .* FluxPipeline; set model.family: flux_kontext"
    ):
        require_family(Flux, PipelineFolder(path=tmp_path))


@pytest.mark.parametrize("component", ["text_encoder_2", "tokenizer_2"])
def test_a_missing_second_encoder_is_named(component: str, tmp_path: Path) -> None:
    family = saved(tiny(), tmp_path)
    for path in (tmp_path / component).iterdir():
        path.unlink()
    with pytest.raises(UserError, match=component):
        family.check_folder()
