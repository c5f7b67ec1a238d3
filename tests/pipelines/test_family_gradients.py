"""What the two gradient switches do to the blocks of every family; a new file is tested here too."""

import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from family_sample import Sample, adapted_transformer, velocity_and_gradients

from diffsynth_lite.core.gradient import (
    GradientEngine,
    blocks_of,
    gradient_checkpoint_forward,
    gradient_engine,
)

FLAGS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("flags", FLAGS[1:])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_flags_change_neither_the_velocity_nor_any_gradient(
    sample: Sample, flags: tuple[bool, bool], dropout: float
) -> None:
    transformer = adapted_transformer(sample, dropout=dropout)
    velocity, gradients = velocity_and_gradients(sample, transformer, (False, False))
    other_velocity, other_gradients = velocity_and_gradients(sample, transformer, flags)
    assert torch.equal(velocity, other_velocity)
    assert gradients.keys() == other_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name


def test_dropout_masks_follow_the_seed(sample: Sample) -> None:
    transformer = adapted_transformer(sample, dropout=0.3)
    first, _ = velocity_and_gradients(sample, transformer, (True, False), seed=3)
    second, _ = velocity_and_gradients(sample, transformer, (True, False), seed=4)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("flags", FLAGS[1:])
def test_every_declared_block_is_recomputed_and_parked(sample: Sample, flags: tuple[bool, bool]) -> None:
    transformer = adapted_transformer(sample)
    engine = GradientEngine()
    # A UNet has blocks before the first layer with a LoRA, which then need no gradient.
    learned = replace(sample, latents=sample.latents.clone().requires_grad_(True))
    with gradient_engine(engine):
        velocity_and_gradients(learned, transformer, flags)
    report = engine.report()
    num_blocks = len(blocks_of(transformer, sample.family.block_lists))
    assert report.blocks_run == report.blocks_recomputed == num_blocks > 0
    tokens = sample.family.num_tokens(sample.latents.shape[1:]) * len(sample.latents)
    if not flags[1]:
        assert report.bytes_parked == 0
        return
    # At the least each block's image tokens are parked, with one fp32 number a token.
    assert report.bytes_parked > num_blocks * tokens * 4


@pytest.mark.parametrize("flags", FLAGS)
def test_every_block_is_called_by_gradient_checkpoint_forward(
    sample: Sample, monkeypatch: pytest.MonkeyPatch, flags: tuple[bool, bool]
) -> None:
    transformer = adapted_transformer(sample)
    calls: list[tuple[Any, ...]] = []

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Some are called by their forward.
        calls.append((getattr(model, "__self__", model), *args[:2]))
        return gradient_checkpoint_forward(model, *args, **kwargs)

    monkeypatch.setattr(module_of_model_fn(sample), gradient_checkpoint_forward.__name__, watched)
    velocity_and_gradients(sample, transformer, flags)
    blocks = blocks_of(transformer, sample.family.block_lists)
    assert calls == [(block, *flags) for block in blocks]


def module_of_model_fn(sample: Sample) -> ModuleType:
    """That of the family, or of the one whose forward it shares."""
    (model_fn,) = (
        value
        for name, value in vars(importlib.import_module(type(sample.family).__module__)).items()
        if name.startswith("model_fn_")
    )
    return importlib.import_module(model_fn.__module__)


def is_idle(gradient: torch.Tensor | None) -> bool:
    """Whether a weight learns nothing; what is cut off behind the layer gives a gradient, of zeros."""
    return gradient is None or not gradient.any()


def test_every_adapter_gets_a_gradient(sample: Sample) -> None:
    _, gradients = velocity_and_gradients(sample, adapted_transformer(sample), (False, False))
    # As long as lora_B is zero, so is the gradient of lora_A.
    learning = {name: gradient for name, gradient in gradients.items() if ".lora_B." in name}
    assert learning
    assert [name for name, gradient in learning.items() if is_idle(gradient)] == []
    assert [name for name, gradient in gradients.items() if gradient is None] == []


def test_layers_dropped_in_the_last_block_would_get_no_gradient(sample: Sample) -> None:
    family = sample.family
    transformer = family.load_transformer(torch.float32)
    dead = family.unused_modules(transformer)
    for name in dead:
        transformer.get_submodule(name).requires_grad_(True)
    used = blocks_of(transformer, family.block_lists)[0]
    used.requires_grad_(True)
    _, gradients = velocity_and_gradients(sample, transformer, (False, False))
    for name in dead:
        assert is_idle(gradients[f"{name}.weight"]), name
