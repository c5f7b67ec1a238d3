"""Every family with its blocks quantised: what is loaded, what is learned, what the gradient switches do."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from family_sample import CPU, Sample, adapted_transformer, engine_with, velocity_and_gradients
from torch import Tensor, nn

from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.core.weights import FrozenLinear, Quantization, WeightFormat, weight_format
from diffsynth_lite.pipelines.base.quantized import quantizable_layers

MAX_DIFFERENCES = {"int8": 0.05, "nf4": 0.6}
"""Of all gradients from those of an fp32 base, relative. The tiny models are random and narrow, so that
errors are as large as anywhere: of those measured (docs/memory.md) the largest are about half of these."""


@pytest.fixture(params=MAX_DIFFERENCES)
def weights(request: pytest.FixtureRequest) -> WeightFormat:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    return weight_format(request.param)


@contextmanager
def quantized(sample: Sample, weights: WeightFormat) -> Iterator[Quantization]:
    """Scope in which the family loads its model with the blocks in this format."""
    family = sample.family
    model = family.parts_of(family.empty_transformer())[family.trained[0]]
    layers = tuple(quantizable_layers(model, family.block_lists))
    family.quantization = Quantization(format=weights, layers=layers, device=CPU)
    try:
        yield family.quantization
    finally:
        family.quantization = None


def in_one(gradients: Mapping[str, Tensor | None]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values() if gradient is not None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_linear_layers_of_the_blocks_are_quantised_and_all_else_is_as_diffusers_loads_it(
    sample: Sample, dtype: torch.dtype
) -> None:
    family = sample.family
    plain = family.load_transformer(dtype)
    stored = family.load_transformer(torch.float32).state_dict()
    with quantized(sample, weight_format("int8")) as quantization:
        model = family.load_transformer(dtype)
    assert model.training == plain.training
    assert not any(parameter.requires_grad for parameter in model.parameters())

    frozen = {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear)}
    in_blocks = {module for block in blocks_in(plain, family.block_lists) for module in block.modules()}
    assert set(frozen) == {name for name, module in plain.named_modules() if module in in_blocks} & {
        name for name, module in plain.named_modules() if type(module) is nn.Linear
    }
    for name, layer in frozen.items():
        values, scales = quantization.format.empty(layer.out_features, layer.in_features, CPU)
        quantization.format.write(stored[f"{name}.weight"], 0, values, scales)
        assert torch.equal(layer.weight, values)
        assert torch.equal(layer.weight_scale, scales)

    ours = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in (dict(plain.named_parameters()) | dict(plain.named_buffers())).items():
        if name.rpartition(".weight")[0] not in frozen:
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name


def test_a_lora_on_quantised_blocks_learns_nearly_what_it_learns_on_plain_ones(
    sample: Sample, weights: WeightFormat
) -> None:
    plain = adapted_transformer(sample)
    _, expected = velocity_and_gradients(sample, plain)
    with quantized(sample, weights):
        model = adapted_transformer(sample)
    velocity, gradients = velocity_and_gradients(sample, model)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert bool(gradient.any()) == bool(expected[name].any()), name
    reference = in_one(expected)
    difference = (in_one(gradients) - reference).norm() / reference.norm()
    assert 0 < difference < MAX_DIFFERENCES[weights.name]

    for flags in ((True, False), (True, True)):
        engine = engine_with(flags)
        other_velocity, other_gradients = velocity_and_gradients(sample, model, engine)
        assert torch.equal(velocity, other_velocity), flags
        for name, gradient in gradients.items():
            assert torch.equal(gradient, other_gradients[name]), (flags, name)
    # As much is recomputed, offloaded and left out.
    plain_engine = engine_with(flags)
    velocity_and_gradients(sample, plain, plain_engine)
    reports = [replace(one.report(), host_bytes_cap=0) for one in (engine, plain_engine)]
    assert reports[0] == reports[1]
