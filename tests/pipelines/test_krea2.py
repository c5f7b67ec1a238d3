"""Krea 2 against diffusers' own transformer and pipeline."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from comfyui_names import updates_in_comfyui
from diffusers import Krea2Pipeline
from diffusers.pipelines.krea2.pipeline_krea2 import calculate_shift
from family_sample import (
    CPU,
    PROMPTS,
    adapted_transformer,
    assert_does_as,
    assert_equal_under_all_flags,
    build_sample,
    load_lora,
    pairs_on,
    velocity_and_gradients,
)
from family_sample import SIGMA as LEVELS

from diffsynth_lite.core.gradient import GradientEngine, gradient_engine
from diffsynth_lite.lora import adapter_settings, adapter_tensors, find_target_layers
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import PipelineFolder
from diffsynth_lite.pipelines.krea2 import Krea2, model_fn_krea2, tiny

SIGMA = torch.tensor([0.2, 0.7])
RECIPE = Path(__file__).parents[2] / "configs" / "krea2_lora.yaml"
AUTHORS = {
    *("img_in", "final_layer.linear", "to_q", "to_k", "to_v", "to_out.0", "to_gate", "ff.up", "ff.down"),
    *("text_fusion.projector", "txt_in.linear_1", "txt_in.linear_2"),
    *("time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
}
"""Of diffusers, commit 58eb52c0803e, ``examples/dreambooth/train_dreambooth_lora_krea2.py``."""


@pytest.fixture(scope="module")
def pipeline() -> Krea2Pipeline:
    return tiny()


@pytest.fixture(scope="module")
def family(pipeline: Krea2Pipeline, tmp_path_factory: pytest.TempPathFactory) -> Krea2:
    folder = tmp_path_factory.mktemp("krea2")
    pipeline.save_pretrained(folder)
    return Krea2(PipelineFolder(path=folder))


def with_settings(pipeline: Krea2Pipeline, folder: Path, **settings: object) -> Krea2:
    """The family on the same components with other settings in ``model_index.json``."""
    Krea2Pipeline(**pipeline.components, **settings).save_pretrained(folder)
    return Krea2(PipelineFolder(path=folder))


def drawn_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, embeddings of two layers, and a mask that hides some in the middle of the first sample."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 1, 8, 4, generator=generator)
    embeds = torch.randn(2, 7, 2, 16, generator=generator)
    return latents, embeds, torch.tensor([[1, 1, 0, 0, 0, 1, 1], [1] * 7])


def own_forward(
    pipeline: Krea2Pipeline, latents: torch.Tensor, embeds: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Packed, placed and unpacked by the pipeline's own methods."""
    velocity = pipeline.transformer(
        hidden_states=pipeline._pack_latents(latents[:, :, 0], 2, 16, 8, 4),
        encoder_hidden_states=embeds,
        timestep=SIGMA,
        position_ids=pipeline.prepare_position_ids(embeds.shape[1], 4, 2, CPU),
        encoder_attention_mask=None if mask is None else mask.bool(),
        return_dict=False,
    )[0]
    return pipeline._unpack_latents(velocity, 8 * 8, 4 * 8)


@pytest.mark.parametrize("is_masked", [False, True])
def test_model_fn_equals_the_transformers_own_forward(pipeline: Krea2Pipeline, is_masked: bool) -> None:
    latents, embeds, drawn_mask = drawn_inputs()
    mask = drawn_mask if is_masked else None
    reference = own_forward(pipeline, latents, embeds, mask)
    expected = assert_equal_under_all_flags(
        pipeline.transformer, reference, model_fn_krea2, latents, SIGMA, embeds, mask
    )
    assert None not in expected.values()


def test_the_blocks_that_read_the_prompt_are_recomputed_too(pipeline: Krea2Pipeline) -> None:
    latents, embeds, mask = drawn_inputs()
    engine = GradientEngine()
    with gradient_engine(engine):
        velocity = model_fn_krea2(
            pipeline.transformer, latents, SIGMA, embeds, mask, use_gradient_checkpointing=True
        )
        velocity.mean().backward()
    assert engine.report().blocks_recomputed == 4


def test_prompts_are_encoded_as_by_the_pipeline_without_its_padding(
    pipeline: Krea2Pipeline, family: Krea2
) -> None:
    texts = [*PROMPTS, "", "circle " * 600]
    encode = family.load_prompt_encoder(torch.float32, CPU)
    encoded = [row["prompt_embeds"] for row in encode([Prompt(text=text) for text in texts])]
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(texts, device=CPU)
    lengths = family.prompt_lengths(texts)
    assert lengths[3] == 5  # what the chat ends with
    assert [len(row) for row in encoded] == [min(length, 512) for length in lengths]
    for row, theirs, theirs_mask in zip(encoded, embeds, mask, strict=True):
        assert row.shape[1:] == (2, 16)
        assert torch.equal(row, theirs[theirs_mask])
    assert not mask[0].all()
    assert mask[0, -5:].all()  # the padding stands before the end of the chat


def test_what_is_cut_away_of_the_padding_is_what_the_pipelines_mask_hides(
    pipeline: Krea2Pipeline, family: Krea2
) -> None:
    latents = drawn_inputs()[0]
    encoded = family.load_prompt_encoder(torch.float32, CPU)([Prompt(text=text) for text in PROMPTS[:2]])
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(list(PROMPTS[:2]), device=CPU)
        padded = own_forward(pipeline, latents, embeds, mask)
        cut = family.predict(pipeline.transformer, latents, SIGMA, encoded)
        unmasked = own_forward(pipeline, latents, embeds, None)
    torch.testing.assert_close(cut, padded, rtol=0, atol=1e-5)
    assert not torch.allclose(unmasked, padded, atol=1e-4)


def test_other_layers_of_the_text_encoder_make_other_cache_entries(
    pipeline: Krea2Pipeline, family: Krea2, tmp_path: Path
) -> None:
    other = with_settings(pipeline, tmp_path, text_encoder_select_layers=(2, 1))
    (prompt,) = prompts = [Prompt(text=PROMPTS[0])]
    (ours,), (theirs,) = (each.load_prompt_encoder(torch.float32, CPU)(prompts) for each in (family, other))
    assert not torch.allclose(ours["prompt_embeds"], theirs["prompt_embeds"])
    with torch.no_grad():
        expected, _ = Krea2Pipeline.from_pretrained(tmp_path).encode_prompt(prompt.text, device=CPU)
    assert torch.equal(theirs["prompt_embeds"][0], expected[0, 0])
    assert family.prompt_encoder_id(torch.float32) != other.prompt_encoder_id(torch.float32)


def test_the_recipe_trains_the_layers_of_the_authors_which_diffusers_and_comfyui_load(
    family: Krea2, tmp_path: Path
) -> None:
    lora = yaml.safe_load(RECIPE.read_text())["lora"]
    assert (set(lora["target_modules"]), lora["rank"]) == (AUTHORS, 32)
    sample = build_sample("krea2", tmp_path / "model")
    transformer = adapted_transformer(sample, targets=lora["target_modules"]).eval()
    settings = adapter_settings(transformer)
    model, targets = family.empty_transformer(), family.default_target_modules
    of_default = find_target_layers(model, targets, unused_modules=[])
    around = [name for name in settings["target_modules"] if name not in of_default]
    assert len(around) == 8
    _, gradients = velocity_and_gradients(sample, transformer)
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.any()] == []

    (file,) = family.save_lora(tmp_path / "lora", adapter_tensors(transformer), settings)
    pipeline = sample.fresh_pipeline()
    load_lora(pipeline, file.parent)
    assert_does_as(pairs_on(pipeline.transformer), transformer)
    with torch.no_grad():
        loaded, trained = (
            family.predict(model, sample.latents, LEVELS, sample.conditioning)
            for model in (pipeline.transformer, transformer)
        )
    assert torch.equal(loaded, trained)
    in_comfyui = {name.removeprefix("transformer.") for name, _ in updates_in_comfyui("krea2", file)}
    assert in_comfyui == set(settings["target_modules"])


def test_raw_has_a_shift_that_grows_with_the_picture_and_turbo_one_for_all(
    pipeline: Krea2Pipeline, family: Krea2, tmp_path: Path
) -> None:
    turbo = with_settings(
        pipeline, tmp_path, is_distilled=True, text_encoder_select_layers=pipeline.text_encoder_select_layers
    )
    assert family.distilled is None
    assert turbo.distilled is not None
    for side in (512, 1024):
        shape = family.latents_shape(side, side, 1)
        mu = calculate_shift(family.num_tokens(shape), 256, 6400, 0.5, 1.15)
        assert family.family_shift(shape) == pytest.approx(math.exp(mu))
        assert turbo.family_shift(shape) == math.exp(1.15)
    assert turbo.prompt_encoder_id(torch.float32) == family.prompt_encoder_id(torch.float32)
