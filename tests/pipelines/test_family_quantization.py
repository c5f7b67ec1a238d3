"""Every family with its blocks quantised: what is loaded, what is learned, what the gradient switches do.

And with its text encoders quantised and streamed.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import pytest
import torch
from family_sample import (
    CPU,
    PROMPTS,
    Sample,
    adapted_transformer,
    build_prompts,
    engine_with,
    velocity_and_gradients,
)
from lazy_backend import LazyBackend
from torch import Tensor, nn

from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.core.weights.formats import WeightFormat, weight_format
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear, Quantization
from diffsynth_lite.core.weights.packing import PackedBlock
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.pipelines.base.quantized import kept_in_fp32, quantizable_layers
from diffsynth_lite.pipelines.base.text_encoders import (
    TextEncoderMemory,
    quantizable_encoder_layers,
    transformer_layers,
)

MAX_DIFFERENCES = {"int8": 0.05, "int8_convrot": 0.05, "nf4": 0.6}
"""Of all gradients from those of an fp32 base, relative. The tiny models are random and narrow, so that
errors are as large as anywhere: of those measured (docs/memory.md) the largest are about half of these."""

AS_ANOTHER = ("flux_fill", "flux_kontext", "qwen_image_layered", "wan_i2v", "wan_vace")
"""Families that inherit all of a prompt's encoding, and have tiny text encoders like that family's."""
of_own_encoders = pytest.mark.families(lambda name, _: name not in AS_ANOTHER)


@pytest.fixture
def weights(request: pytest.FixtureRequest, sample: Sample) -> WeightFormat:
    """They take turns: no family knows one, and all layers of each are quantised to int8 in other tests."""
    name = request.node.callspec.params["sample"]
    has_turn = len(name) % 2 and importlib.util.find_spec("bitsandbytes")
    return weight_format("nf4" if has_turn else "int8_convrot")


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


@pytest.mark.of_the_model
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
        name
        for name, module in plain.named_modules()
        if type(module) is nn.Linear and not kept_in_fp32(plain, name)
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


@pytest.mark.of_the_model
def test_a_lora_on_quantised_blocks_learns_nearly_what_it_learns_on_plain_ones(
    sample: Sample, weights: WeightFormat
) -> None:
    _, expected = sample.learned
    with quantized(sample, weights):
        model = adapted_transformer(sample.family)
    velocity, gradients = velocity_and_gradients(sample, model)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert bool(gradient.any()) == bool(expected[name].any()), name
    reference = in_one(expected)
    difference = (in_one(gradients) - reference).norm() / reference.norm()
    assert 0 < difference < MAX_DIFFERENCES[weights.name]

    engine, plain_engine = engine_with((True, True)), engine_with((True, True))
    other_velocity, other_gradients = velocity_and_gradients(sample, model, engine)
    assert torch.equal(velocity, other_velocity)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, other_gradients[name]), name
    # As much is recomputed, offloaded and left out.
    velocity_and_gradients(sample, sample.adapted(), plain_engine)
    reports = [replace(one.report(), host_bytes_cap=0) for one in (engine, plain_engine)]
    assert reports[0] == reports[1]


def quantizations(sample: Sample, weights: WeightFormat) -> dict[str, Quantization]:
    """Of all linear layers that the family's text encoders can have in a format."""
    encoders = {name: sample.family.empty_component(name) for name in sample.family.text_encoders}
    layers = {name: tuple(quantizable_encoder_layers(encoder)) for name, encoder in encoders.items()}
    return {name: Quantization(format=weights, layers=layers[name], device=CPU) for name in encoders}


@contextmanager
def kept_as(sample: Sample, memory: TextEncoderMemory) -> Iterator[None]:
    """Scope in which the family's text encoders are kept in another way."""
    plain, sample.family.text_encoder_memory = sample.family.text_encoder_memory, memory
    try:
        yield
    finally:
        sample.family.text_encoder_memory = plain


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[LazyBackend]:
    """Those that text encoders were streamed by, each of which copies as late as it may."""
    made: list[LazyBackend] = []

    def make(_device: torch.device) -> LazyBackend:
        made.append(LazyBackend())
        return made[-1]

    monkeypatch.setattr("diffsynth_lite.pipelines.base.text_encoders.backend_for", make)
    return made


def num_slots(sample: Sample) -> int:
    """Two where a text encoder has more layers, so that one is fetched ahead; else one."""
    encoders = map(sample.family.empty_component, sample.family.text_encoders)
    stacks = [stack for encoder in encoders for stack in transformer_layers(encoder)]
    return min(2, max(map(len, stacks)) - 1)


def encoded(sample: Sample, memory: TextEncoderMemory) -> list[Conditioning]:
    """The first prompt of the sample and the negative one, each by itself."""
    with kept_as(sample, memory):
        encode = memory.watched(lambda: sample.family.load_prompt_encoder(torch.float32, CPU))
        first, *_, negative = build_prompts(sample.family, sample.media)
        assert first.text == PROMPTS[0]
        return [encode([prompt])[0] for prompt in (first, negative)]


def assert_same(ours: list[Conditioning], theirs: list[Conditioning]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@of_own_encoders
def test_text_encoders_are_quantised_and_all_else_is_as_transformers_loads_it(sample: Sample) -> None:
    family, given = sample.family, quantizations(sample, weight_format("int8"))
    dtype = torch.float16  # in which transformers keeps some layers in fp32
    for component, quantization in given.items():
        plain, stored = (family.load_component(component, one) for one in (dtype, torch.float32))
        with kept_as(sample, TextEncoderMemory(quantizations=given)):
            model = family.load_component(component, dtype)
        assert model.training == plain.training
        frozen = [name for name, module in model.named_modules() if isinstance(module, FrozenLinear)]
        assert frozen == list(quantization.layers) != []
        for name in frozen:
            layer, weight = model.get_submodule(name), stored.get_submodule(name).weight
            values, scales = quantization.format.empty(*weight.shape, CPU)
            quantization.format.write(weight, 0, values, scales)
            assert torch.equal(layer.weight, values)
            assert torch.equal(layer.weight_scale, scales)
        # The tied ones under all of their names.
        ours, theirs = (
            dict(chain(one.named_parameters(remove_duplicate=False), one.named_buffers()))
            for one in (model, plain)
        )
        assert len(set(theirs.values())) == len({ours[name] for name in theirs})
        for name, tensor in theirs.items():
            if name.rpartition(".weight")[0] not in frozen:
                assert ours[name].dtype == tensor.dtype, name
                assert torch.equal(ours[name], tensor), name


@of_own_encoders
def test_streamed_text_encoders_encode_as_resident_ones_do_however_late_a_copy_comes(
    sample: Sample, backends: list[LazyBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = PackedBlock.bind

    def bound(block: PackedBlock, memory: Tensor) -> None:
        """Host memory is out of reach, as it is for a device: only layers may use their weights."""
        bind(block, memory.to("meta") if memory is block.host else memory)

    monkeypatch.setattr(PackedBlock, "bind", bound)
    memory = TextEncoderMemory(num_slots=num_slots(sample))
    assert_same(encoded(sample, memory), [sample.first, sample.negative])
    assert len(backends) == 1


@of_own_encoders
def test_quantised_text_encoders_encode_nearly_the_same_streamed_or_not(
    sample: Sample, weights: WeightFormat, backends: list[LazyBackend]
) -> None:
    given = quantizations(sample, weights)
    found = encoded(sample, TextEncoderMemory(quantizations=given))
    for ours, plain in zip(found, [sample.first, sample.negative], strict=True):
        for name in ("prompt_embeds", "pooled_prompt_embeds"):
            if name in plain:
                difference = (ours[name] - plain[name]).norm() / plain[name].norm()
                assert difference < MAX_DIFFERENCES[weights.name]
    assert not backends
    memory = TextEncoderMemory(quantizations=given, num_slots=num_slots(sample))
    assert_same(encoded(sample, memory), found)
    assert len(backends) == 1
