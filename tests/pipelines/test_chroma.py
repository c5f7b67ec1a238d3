"""Chroma against diffusers' own transformer, autoencoder and pipeline."""

from pathlib import Path

import pytest
import torch
from diffusers import (
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
)
from family_sample import CPU, PROMPTS, assert_equal_under_all_flags, gradients

from diffsynth_lite.core.gradient import GradientEngine, blocks_of, gradient_engine
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder, require_family
from diffsynth_lite.pipelines.chroma import Chroma, model_fn_chroma, tiny

SIGMA = torch.tensor([0.2, 0.7])
Gradients = dict[str, torch.Tensor | None]


@pytest.fixture(scope="module")
def pipeline() -> ChromaPipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: ChromaPipeline, tmp_path_factory: pytest.TempPathFactory) -> Chroma:
    folder = tmp_path_factory.mktemp("chroma")
    pipeline.save_pretrained(folder)
    return Chroma(PipelineFolder(path=folder))


@pytest.fixture
def transformer() -> ChromaTransformer2DModel:
    return tiny().transformer


def encoded_prompts(family: Chroma, *texts: str) -> list[dict[str, torch.Tensor]]:
    return family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in texts])


def drawn_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, prompt embeddings, and a mask that hides some of them in the first sample."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 8, 4, generator=generator)
    embeds = torch.randn(2, 7, 32, generator=generator)
    return latents, embeds, torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7])


def own_forward(
    transformer: ChromaTransformer2DModel,
    latents: torch.Tensor,
    embeds: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """2 x 2 patches in reading order, written out instead of through diffusers' packing."""
    patches = latents.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(2, 8, 64)
    positions = torch.tensor([[0, row, column] for row in range(4) for column in range(2)])
    velocity = transformer(
        hidden_states=patches,
        timestep=SIGMA,
        encoder_hidden_states=embeds,
        txt_ids=torch.zeros(7, 3),
        img_ids=positions.float(),
        attention_mask=None if mask is None else torch.cat([mask.bool(), torch.ones(2, 8).bool()], dim=1),
        return_dict=False,
    )[0]
    return FluxPipeline._unpack_latents(velocity, 8 * 8, 4 * 8, vae_scale_factor=8)


def differing(first: Gradients, second: Gradients) -> list[str]:
    assert None not in (*first.values(), *second.values())
    return [name for name, gradient in first.items() if not torch.equal(gradient, second[name])]


@pytest.mark.parametrize("is_masked", [False, True])
def test_model_fn_equals_the_transformers_own_forward(
    transformer: ChromaTransformer2DModel, is_masked: bool
) -> None:
    latents, embeds, drawn_mask = drawn_inputs()
    mask = drawn_mask if is_masked else None
    reference = own_forward(transformer, latents, embeds, mask)
    assert_equal_under_all_flags(
        transformer,
        reference,
        model_fn_chroma,
        latents,
        SIGMA,
        embeds,
        mask,
    )


def test_diffusers_own_checkpointing_forgets_the_mask_and_ours_does_not(
    transformer: ChromaTransformer2DModel,
) -> None:
    latents, embeds, mask = drawn_inputs()
    plain = own_forward(transformer, latents, embeds, mask)
    expected = gradients(transformer, plain)

    transformer.enable_gradient_checkpointing()
    # The day this fails, diffusers passes the mask on, and its hook can be used here as elsewhere.
    theirs = own_forward(transformer, latents, embeds, mask)
    assert not torch.allclose(theirs[0], plain[0], rtol=0, atol=1e-4)
    assert len(differing(gradients(transformer, theirs), expected)) > len(expected) / 2
    assert torch.equal(theirs[1], plain[1])  # whose mask hides nothing

    transformer.disable_gradient_checkpointing()
    ours = model_fn_chroma(transformer, latents, SIGMA, embeds, mask, use_gradient_checkpointing=True)
    assert torch.equal(ours, plain)
    assert differing(gradients(transformer, ours), expected) == []


def test_the_blocks_are_as_before_and_ran_in_the_order_in_which_they_are_declared(
    family: Chroma, transformer: ChromaTransformer2DModel
) -> None:
    latents, embeds, mask = drawn_inputs()
    declared = blocks_of(transformer, family.block_lists)
    run: list[torch.nn.Module] = []
    for block in declared:
        block.register_forward_pre_hook(lambda module, _args: run.append(module))
    engine = GradientEngine()
    with gradient_engine(engine):
        model_fn_chroma(transformer, latents, SIGMA, embeds, mask, use_gradient_checkpointing_offload=True)
    assert len(run) == engine.report().blocks_run == 4
    assert all(block is other for block, other in zip(run, declared, strict=True))
    assert not any("forward" in vars(block) for block in declared)
    assert not transformer.gradient_checkpointing


def test_prompts_are_encoded_as_by_the_pipeline_with_one_token_of_padding(
    pipeline: ChromaPipeline, family: Chroma
) -> None:
    texts = [*PROMPTS, "", "circle " * 200]
    encoded = [row["prompt_embeds"] for row in encoded_prompts(family, *texts)]
    with torch.no_grad():
        embeds, _, mask, *_ = pipeline.encode_prompt(texts, device=CPU, do_classifier_free_guidance=False)
    lengths = family.prompt_lengths(texts)
    assert lengths[3] == 1  # the end of the text
    assert [len(row) for row in encoded] == [min(length + 1, 512) for length in lengths]
    for row, theirs, theirs_mask in zip(encoded, embeds, mask, strict=True):
        assert torch.equal(row, theirs[: len(row)])
        assert theirs_mask.tolist() == [1] * len(row) + [0] * (512 - len(row))


def test_what_is_cut_away_of_the_padding_is_what_a_mask_would_hide(
    pipeline: ChromaPipeline, family: Chroma
) -> None:
    transformer, latents = pipeline.transformer, drawn_inputs()[0]
    with torch.no_grad():
        embeds, _, mask, *_ = pipeline.encode_prompt(
            list(PROMPTS[:2]), device=CPU, do_classifier_free_guidance=False
        )
        padded = model_fn_chroma(transformer, latents, SIGMA, embeds, mask)
        cut = family.predict(transformer, latents, SIGMA, encoded_prompts(family, *PROMPTS[:2]))
        alone = family.predict(transformer, latents[:1], SIGMA[:1], encoded_prompts(family, PROMPTS[0]))
        unmasked = model_fn_chroma(transformer, latents, SIGMA, embeds)
    torch.testing.assert_close(cut, padded, rtol=0, atol=1e-5)
    torch.testing.assert_close(cut[:1], alone, rtol=0, atol=1e-5)
    assert not torch.allclose(unmasked, padded, atol=1e-3)


def test_the_pipelines_own_mask_of_numbers_hides_less_than_one_of_truth_values(
    pipeline: ChromaPipeline,
) -> None:
    # The day this fails, diffusers issue 12116 is mended, and test_family_fidelity.py need not do it.
    pipeline.set_progress_bar_config(disable=True)
    embeds, _, mask, *_ = pipeline.encode_prompt(PROMPTS[0], device=CPU, do_classifier_free_guidance=False)
    assert mask.is_floating_point()
    drawn = [
        pipeline(
            prompt_embeds=embeds,
            prompt_attention_mask=given,
            guidance_scale=1.0,
            width=64,
            height=32,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(3),
            output_type="pt",
        ).images
        for given in (mask, mask.bool())
    ]
    assert (drawn[0] - drawn[1]).abs().max() > 1 / 255


def test_the_shift_is_the_one_of_the_folders_sampler(pipeline: ChromaPipeline, tmp_path: Path) -> None:
    parts = pipeline.components | {"scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)}
    ChromaPipeline(**parts).save_pretrained(tmp_path)
    family = Chroma(PipelineFolder(path=tmp_path))
    assert family.family_shift(family.latents_shape(512, 512, 1)) == 3.0
    assert family.family_shift(family.latents_shape(1024, 1024, 1)) == 3.0


def test_no_layer_of_the_last_block_is_unused(family: Chroma, transformer: ChromaTransformer2DModel) -> None:
    latents, _, _ = drawn_inputs()
    velocity = family.predict(transformer, latents[:1], torch.ones(1), encoded_prompts(family, "a ring"))
    found = gradients(transformer, velocity)
    assert family.unused_in_last_block == ()
    assert [name for name, gradient in found.items() if gradient is None] == []


def test_a_folder_of_flux_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(
        UserError, match=r"holds a FluxPipeline, but .* ChromaPipeline; set model.family: flux,"
    ):
        require_family(Chroma, PipelineFolder(path=tmp_path))


@pytest.mark.parametrize("component", ["text_encoder", "tokenizer"])
def test_a_missing_component_is_named(pipeline: ChromaPipeline, component: str, tmp_path: Path) -> None:
    pipeline.save_pretrained(tmp_path)
    for path in (tmp_path / component).iterdir():
        path.unlink()
    with pytest.raises(UserError, match=component):
        Chroma(PipelineFolder(path=tmp_path)).check_folder()
