"""The layers that each family offers for a LoRA, by name; a new file is tested here too."""

from pathlib import Path

import pytest
import torch
from family_sample import (
    SIGMA,
    Sample,
    adapted_transformer,
    assert_does_as,
    engine_with,
    load_lora,
    pairs_on,
    velocity_and_gradients,
)

from diffsynth_lite.core.gradient import blocks_of
from diffsynth_lite.lora import adapter_settings, adapter_tensors, find_target_layers
from diffsynth_lite.lora.updates import pairs_of
from diffsynth_lite.pipelines import family_names

SETS = ("attention", "all")
BEYOND_BLOCKS = {"sdxl": ("proj_in", "proj_out")}
"""Endings of what ``all`` holds beside the layers of the blocks."""
NOT_TRAINED = {"sdxl": ("time_emb_proj",)}
"""Endings of linear layers of the blocks that ``all`` leaves out."""


def set_of(sample: Sample, name: str) -> tuple[str, ...]:
    """Those kept elsewhere need not name any."""
    if sample.name not in family_names() and not sample.family.target_sets:
        pytest.skip("names no sets")
    return sample.family.target_sets[name]


def layers_of(sample: Sample, model: torch.nn.Module, targets: tuple[str, ...]) -> set[str]:
    return {*find_target_layers(model, targets, unused_modules=sample.family.unused_modules(model))}


def linear_layers_in(model: torch.nn.Module, modules: list[str]) -> set[str]:
    inside = tuple(f"{module}." for module in modules)
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith(inside)
    }


def test_the_sets_hold_all_linear_layers_of_the_blocks_and_those_of_their_attention(sample: Sample) -> None:
    family = sample.family
    model = family.empty_transformer()
    names = {module: name for name, module in model.named_modules()}
    of_blocks = linear_layers_in(model, [names[block] for block in blocks_of(model, family.block_lists)])
    unused = tuple(family.unused_modules(model))
    used = {name for name in of_blocks if not name.startswith(unused)}
    beyond = {name for name in names.values() if name.endswith(BEYOND_BLOCKS.get(sample.name, ()))}
    left_out = {name for name in used if name.endswith(NOT_TRAINED.get(sample.name, ()))}
    every = layers_of(sample, model, set_of(sample, "all"))
    assert every == (used | beyond) - left_out
    projections = linear_layers_in(
        model, [name for module, name in names.items() if type(module).__name__.endswith("Attention")]
    )
    assert layers_of(sample, model, set_of(sample, "attention")) == projections & used
    assert layers_of(sample, model, family.default_target_modules) <= every


@pytest.mark.parametrize("name", SETS)
def test_every_adapter_of_a_set_learns_and_the_flags_change_nothing(sample: Sample, name: str) -> None:
    transformer = adapted_transformer(sample, targets=set_of(sample, name))
    velocity, gradients = velocity_and_gradients(sample, transformer)
    assert [layer for layer, gradient in gradients.items() if gradient is None or not gradient.any()] == []
    engine = engine_with((True, True))
    # What the recompute left out and was needed after all runs at once in the second step.
    for _ in range(2):
        other_velocity, other_gradients = velocity_and_gradients(sample, transformer, engine)
        assert torch.equal(velocity, other_velocity)
        for layer, gradient in gradients.items():
            assert torch.equal(gradient, other_gradients[layer]), layer


@pytest.mark.parametrize("name", SETS)
def test_a_lora_of_a_set_draws_the_same_in_the_diffusers_pipeline(
    sample: Sample, name: str, tmp_path: Path
) -> None:
    family = sample.family
    if set_of(sample, name) == family.default_target_modules:
        pytest.skip("the default: test_a_saved_lora_draws_the_same_in_the_diffusers_pipeline")
    transformer = adapted_transformer(sample, targets=set_of(sample, name)).eval()
    family.save_lora(tmp_path, adapter_tensors(transformer), adapter_settings(transformer))
    assert_does_as(pairs_of(*family.read_lora(tmp_path)), transformer)
    pipeline = sample.fresh_pipeline()
    load_lora(pipeline, tmp_path)
    assert_does_as(pairs_on(getattr(pipeline, *family.trained)), transformer)
    with torch.no_grad():
        reloaded, trained = (
            family.predict(model, sample.latents, SIGMA, sample.conditioning)
            for model in (getattr(pipeline, *family.trained), transformer)
        )
    assert torch.equal(reloaded, trained)
