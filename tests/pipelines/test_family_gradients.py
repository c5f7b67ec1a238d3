"""What the two gradient switches do to the blocks of every family; a new file is tested here too."""

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from family_sample import (
    CPU,
    FLAGS,
    SIGMA,
    Sample,
    adapted_transformer,
    engine_with,
    families_to_test,
    gradients,
    items_with_images,
    transformer_calls,
    velocity_and_gradients,
)
from krea2_edit_reference import ReferencedTransformer
from lazy_backend import LazyBackend
from processes import group_of_one
from torch.utils._pytree import tree_leaves, tree_map_only

from diffsynth_lite.core.gradient import BlockPolicy, blocks_of, gradient_checkpoint_forward, gradient_engine
from diffsynth_lite.core.weights.sharding import BaseShards
from diffsynth_lite.core.weights.stream import WeightStream
from diffsynth_lite.pipelines import family_names
from diffsynth_lite.pipelines.anima import without_torchvision

pytestmark = pytest.mark.of_the_model


@pytest.mark.further_layouts
def test_the_model_is_run_as_by_its_own_forward_to_the_last_gradient(
    sample: Sample,
) -> None:
    family = sample.family
    for one in (sample, *items_with_images(sample)):
        model = family.load_transformer(torch.float32).requires_grad_(True)
        part = family.parts_of(model)[family.trained[0]]
        calls: list[Any] = []
        hook = part.register_forward_hook(partial(record, calls), with_kwargs=True)
        sigma = SIGMA[-len(one.latents) :]
        found = []
        for flags in (FLAGS[0], FLAGS[-1]):
            calls.clear()
            with gradient_engine(engine_with(flags)):
                family.predict(model, one.latents, sigma, one.conditioning)
            found.append(outputs_and_gradients(part, [output for *_, output in calls]))
        hook.remove()
        same: Callable[..., bool] = torch.equal
        if sample.name == "krea2_edit":  # diffusers' forward has no references
            part.__class__, same = ReferencedTransformer, partial(torch.allclose, rtol=1e-4, atol=1e-6)
        with without_torchvision():
            outputs = [part(*args, **named) for args, named, _ in calls]
        expected = outputs_and_gradients(part, outputs)
        assert expected
        for ours in found:
            for name, tensor in expected.items():
                assert tensor is ours[name] is None or same(tensor, ours[name]), name


PASSED_ON = [
    ("anima", "attention_mask", "attention_mask", torch.arange(512) < torch.tensor([[512], [9], [3]])),
    # In pixels, as the pipeline has it.
    ("anima", "padding_mask", "padding_mask", (torch.arange(64) < 8).float().expand(1, 1, 32, 64)),
    ("qwen_image_layered", "additional_t_cond", "additional_t_cond", torch.tensor([1, 0, 1])),
    ("wan_vace", "control_scale", "control_hidden_states_scale", torch.tensor([0.25, 0.75])),
]
"""Families, an argument of the model function that no run gives this value, and its name in the forward."""


@pytest.mark.parametrize(
    ("name", "argument", "in_forward", "value"), PASSED_ON, ids=[argument for _, argument, *_ in PASSED_ON]
)
def test_an_argument_that_no_run_changes_is_that_of_the_models_forward(
    sample_of: Callable[[str], Sample],
    name: str,
    argument: str,
    in_forward: str,
    value: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if name not in families_to_test(request.config):
        pytest.skip(f"{name} is not among the families of --family")
    sample = sample_of(name)
    family, model = sample.family, sample.model
    model_fn = type(family).model_fn
    passing_on = staticmethod(lambda *given, **named: model_fn(*given, **named | {argument: value}))
    monkeypatch.setattr(type(family), "model_fn", passing_on)
    batch = sample.latents, SIGMA, sample.conditioning
    (call,) = transformer_calls(model, lambda: family.predict(model, *batch))
    assert torch.equal(call[in_forward], value)
    test_the_model_is_run_as_by_its_own_forward_to_the_last_gradient(sample)


def record(calls: list[Any], _model: torch.nn.Module, *call: Any) -> None:
    calls.append(call)


def outputs_and_gradients(model: torch.nn.Module, outputs: Sequence[Any]) -> dict[str, torch.Tensor | None]:
    """All that the model returned, and the gradients of its mean square by the names of the weights."""
    flat = torch.cat([leaf.flatten() for leaf in tree_leaves(outputs)])
    return {"outputs": flat.detach(), **gradients(model, flat)}


def test_weights_that_come_for_the_run_of_a_block_change_nothing(sample: Sample) -> None:
    """From host memory, whenever copies run, and from shards."""
    resident, streamed, backend = sample.adapted(), deepcopy(sample.adapted()), LazyBackend()
    blocks = blocks_of(streamed, sample.family.block_lists)
    stream = WeightStream([blocks], CPU, num_slots=1, backend=backend)
    # Some blocks keep what they compute, the others offload their inputs.
    policy = BlockPolicy(select="every_n", n=2)
    engines = [engine_with((False, True), backend=one, policy=policy) for one in (None, backend, None)]
    expected = [velocity_and_gradients(sample, resident, engines[0])] * 2
    others = [velocity_and_gradients(sample, streamed, engines[1])]
    with group_of_one() as group, sharded(sample, group):
        others.append(velocity_and_gradients(sample, adapted_transformer(sample.family), engines[2]))
    if sample.name.startswith("kandinsky5"):
        # A block gives several gradients to what the text blocks made. With a node before each block, which
        # torch's fully_shard puts there, those of one block are added up first: other last digits.
        resident = deepcopy(resident)
        for block in blocks_of(resident, sample.family.block_lists):
            block.register_forward_pre_hook(lambda _, args: tree_map_only(torch.Tensor, torch.clone, args))
        expected[1] = velocity_and_gradients(sample, resident, engine_with((False, True), policy=policy))
    for (velocity, learned), (other_velocity, other_learned) in zip(expected, others, strict=True):
        assert torch.equal(velocity, other_velocity)
        assert learned.keys() == other_learned.keys()
        for name, gradient in learned.items():
            other = other_learned[name]
            assert gradient is other is None or torch.equal(gradient, other), name
    # What is available on this machine changes meanwhile.
    reports = [replace(engine.report(), host_bytes_cap=0) for engine in engines]
    assert reports[0] == reports[1] == reports[2]
    assert stream.report().blocks_streamed == len(blocks)


@contextmanager
def sharded(sample: Sample, group: torch.distributed.ProcessGroup) -> Iterator[None]:
    """Scope in which the family loads its model as shards."""
    family = sample.family
    family.shards = BaseShards(group, CPU, family.block_lists)
    try:
        yield
    finally:
        family.shards = None


def targets_of(sample: Sample, name: str) -> tuple[str, ...]:
    """Targets of which the first lets the recompute leave out most, and the last nothing."""
    if name == "queries":
        return ("to_query",) if sample.name.startswith("kandinsky5") else ("to_q",)
    if name == "default":
        return ()
    return tuple(name for name, module in sample.model.named_modules() if isinstance(module, torch.nn.Linear))


GATES_LEARN = {
    "queries": set[str](),
    "default": {"qwen_image", "qwen_image_edit", "qwen_image_layered"},
    # A UNet's residual blocks have no gates, nor have those that read the prompts of Krea 2 and MiniMax-H3.
    "everything": {*family_names()} - {"krea2", "krea2_edit", "minimax_h3", "sdxl"},
}
"""Families whose products are needed, by what gets a LoRA."""


@pytest.mark.parametrize("targets", GATES_LEARN)
def test_what_the_recompute_leaves_out_changes_no_gradient(sample: Sample, targets: str) -> None:
    transformer = sample.adapted(targets_of(sample, targets))
    is_learned = targets == "default"
    _, expected = sample.learned if is_learned else velocity_and_gradients(sample, transformer)
    engine = engine_with((True, False))
    # What was needed in the first step runs at once in the second.
    for _ in range(2 if sample.name in GATES_LEARN[targets] else 1):
        engine.start_report()
        _, gradients = velocity_and_gradients(sample, transformer, engine)
        for name, gradient in expected.items():
            assert gradient is gradients[name] is None or torch.equal(gradient, gradients[name]), name
        if targets == "queries" or sample.name in family_names():
            leaves_out = sample.family.unused_matmuls and sample.name not in GATES_LEARN[targets]
            assert (engine.report().dead_ops_skipped > 0) == bool(leaves_out)


def test_every_declared_block_runs_through_the_engine_and_the_flags_change_nothing_also_with_dropout(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformer = adapted_transformer(sample.family, dropout=0.3)
    # A UNet has blocks before the first layer with a LoRA, which then need no gradient.
    learned = replace(sample, latents=sample.latents.clone().requires_grad_(True))
    velocity, gradients = velocity_and_gradients(learned, transformer)
    calls: list[tuple[Any, ...]] = []

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        # Some are called by their forward.
        calls.append((getattr(model, "__self__", model), *args[:2]))
        return gradient_checkpoint_forward(model, *args, **kwargs)

    monkeypatch.setattr(module_of_model_fn(sample), gradient_checkpoint_forward.__name__, watched)
    part = sample.family.parts_of(transformer)[sample.family.trained[0]]
    blocks = blocks_of(part, sample.family.block_lists) * num_forwards(sample)
    tokens = sample.family.num_tokens(sample.latents.shape[1:]) * len(sample.latents)
    for flags in FLAGS:
        calls.clear()
        engine = engine_with(flags)
        other_velocity, other_gradients = velocity_and_gradients(learned, transformer, engine)
        assert torch.equal(velocity, other_velocity), flags
        assert gradients.keys() == other_gradients.keys()
        for name, gradient in gradients.items():
            assert torch.equal(gradient, other_gradients[name]), (flags, name)
        assert calls == [(block, *flags) for block in blocks]
        assert not any("forward" in vars(block) for block in blocks)  # nothing is left on them
        report = engine.report()
        assert report.blocks_run == len(blocks) > 0
        assert report.blocks_recomputed == (len(blocks) if any(flags) else 0)
        # At the least each block's image tokens are offloaded, with one fp32 number a token.
        assert report.bytes_offloaded > len(blocks) * tokens * 4 if flags[1] else report.bytes_offloaded == 0
    # The masks of dropout follow the seed.
    other_velocity, _ = velocity_and_gradients(sample, transformer, engine, seed=4)
    assert not torch.equal(velocity, other_velocity)


def num_forwards(sample: Sample) -> int:
    """Passes through the model that the batch takes: Qwen-Image 2.1 has one for each length of prompts."""
    lengths = {len(prompt["prompt_embeds"]) for prompt in sample.prompts}
    return len(lengths) if sample.family.splits_batches else 1


def module_of_model_fn(sample: Sample) -> ModuleType:
    """That of the family, or of the one whose forward it shares."""
    (model_fn,) = (
        value
        for name, value in vars(importlib.import_module(type(sample.family).__module__)).items()
        if name.startswith("model_fn_")
    )
    return importlib.import_module(model_fn.__module__)


def test_the_two_flags_are_named_in_the_signature_and_no_other_is_taken(sample: Sample) -> None:
    (model_fn,) = (value for name, value in vars(module_of_model_fn(sample)).items() if "model_fn_" in name)
    flags = ["use_gradient_checkpointing", "use_gradient_checkpointing_offload"]
    defaults = [inspect.signature(model_fn).parameters[flag].default for flag in flags]
    assert defaults == [False, False]
    with pytest.raises(TypeError, match="use_checkpointing"):
        inspect.signature(model_fn).bind_partial(use_checkpointing=True)


def is_idle(gradient: torch.Tensor | None) -> bool:
    """Whether a weight learns nothing; what is cut off after the layer gives a gradient, of zeros."""
    return gradient is None or not gradient.any()


def test_every_adapter_gets_a_gradient(sample: Sample) -> None:
    _, gradients = sample.learned
    # As long as lora_B is zero, so is the gradient of lora_A.
    learning = {name: gradient for name, gradient in gradients.items() if ".lora_B." in name}
    assert learning
    assert [name for name, gradient in learning.items() if is_idle(gradient)] == []
    assert [name for name, gradient in gradients.items() if gradient is None] == []


@pytest.mark.families(lambda _, family: family.unused_in_last_block)
def test_layers_dropped_in_the_last_block_would_get_no_gradient(sample: Sample) -> None:
    family = sample.family
    transformer = family.load_transformer(torch.float32)
    unused = family.unused_modules(transformer)
    for name in unused:
        transformer.get_submodule(name).requires_grad_(True)
    used = blocks_of(transformer, family.block_lists)[0]
    used.requires_grad_(True)
    _, gradients = velocity_and_gradients(sample, transformer)
    for name in unused:
        inside = [one for one in gradients if one.startswith(f"{name}.")]
        assert f"{name}.weight" in inside or len(inside) > 1
        assert [one for one in inside if not is_idle(gradients[one])] == []
