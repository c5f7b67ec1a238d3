"""What is counted on meta with a few blocks is what all of them take, and what a step on the CPU holds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from family_inputs import COUNTED, CountedRelease
from family_subject import conditioning_of, family_of
from held_step import CPU, assert_same_cost, step_on_cpu

from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy, blocks_in
from diffsynth_lite.core.planning import count_step, counts
from diffsynth_lite.core.weights import Int8, Quantization
from diffsynth_lite.lora import add_adapter, add_training_adapter, find_target_layers
from diffsynth_lite.lora.updates import LoraFile
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.training.planning import memory_count
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings

RANK = 4
FROZEN = ("attn.to_q", "img_mlp.net.2")
PARK = BlockStrategy(offload=True, save_attention="park")
RESIDENT = StepSettings()
OFFLOADED = StepSettings(use_gradient_checkpointing_offload=True, min_bytes=0)


@contextmanager
def narrow(family: str, num_blocks: int) -> Iterator[tuple[ModelFamily, CountedRelease]]:
    """A release of a family with a few heads and blocks."""
    release = next(release for release in COUNTED if release.family == family)
    with family_of(release, {**dict.fromkeys(release.depths, num_blocks), **release.small}) as found:
        yield found, release


def counter_of(
    family: ModelFamily, release: CountedRelease, training_adapter: LoraFile | None = None
) -> MemoryCounter:
    pixels = release.small_pixels
    return MemoryCounter(
        family,
        targets(family, family.empty_transformer()),
        rank=RANK,
        latents_shape=family.latents_shape(*pixels),
        conditioning=conditioning_of(family, release, pixels),
        training_adapter=training_adapter,
    )


def targets(family: ModelFamily, model: torch.nn.Module) -> list[str]:
    return find_target_layers(
        model, family.default_target_modules, unused_modules=family.unused_modules(model)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_blocks", "numbers"), [("flux", 5, [5]), ("wan", 9, [4, 5])])
def test_a_few_blocks_of_each_list_take_what_all_of_them_take(
    name: str, num_blocks: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    monkeypatch.setattr(memory_count, "count_step", lambda *a, **k: counted.append(1) or count_step(*a, **k))
    policies = [BlockPolicy(select="last_k", n=n) for n in numbers]
    mixtures = [replace(OFFLOADED, policy=replace(policy, selected=PARK)) for policy in policies]
    with narrow(name, num_blocks) as (family, release):
        counter = counter_of(family, release)
        few = [counter.count(settings) for settings in mixtures]
        # Another number of blocks that are treated alike takes no other count.
        assert len(counted) == 1
        monkeypatch.setattr(counts, "fewer_blocks", lambda kinds, _: (list(range(len(kinds))), []))
        whole = counter_of(family, release)
        assert [whole.count(settings) for settings in mixtures] == few
    assert len({count.device for count in few}) == len(few)
    assert all(count.step.host > 0 and count.step.forward.flops > 0 for count in few)


def test_blocks_of_which_each_counts_are_all_kept() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2, device="meta") for _ in range(9))
    alike, each = (
        counts.BlockLists(model, ["blocks"], {}, are_alike=are_alike).few(BlockPolicy(), num_neighbours=1)
        for are_alike in (True, False)
    )
    assert (alike.kept, len(alike.repeats)) == (((0, 1, 2, 3),), 1)
    assert (each.kept, each.repeats) == ((tuple(range(9)),), ())
    assert each.policy.blocks == tuple(range(9))


def test_weights_that_are_streamed_are_on_the_host_and_the_device_has_slots_for_the_largest_block() -> None:
    with narrow("flux", 2) as (family, release):
        counter = counter_of(family, release)
        model = family.empty_transformer().to(torch.bfloat16)
        blocks = blocks_in(model, family.block_lists)
        sizes = [sum(weight.nbytes for weight in weights_to_move(block)) for block in blocks]
        whole = [sum(weight.nbytes for weight in block.parameters()) for block in blocks]
        packed = [
            sum(-(-(weight.nbytes + 64) // 512) * 512 for weight in weights_to_move(block))
            for block in blocks
        ]
        resident, streamed, half, int8, nf4, averaged, sharded = (
            counter.count(replace(RESIDENT, **settings))
            for settings in (
                {},
                {"stream_blocks": "all", "stream_slots": 3},
                {"stream_blocks": 2},
                {"quantize": "int8"},
                {"quantize": "nf4"},
                {"has_average": True},
                {"num_shards": 4},
            )
        )
        names = quantizable_layers(model, family.block_lists)
        quantised = [model.get_submodule(name).weight for name in names]
    assert resident.weights == sum(weight.nbytes for weight in model.parameters())
    assert (resident.slots, resident.host) == (0, 0)
    assert streamed.weights == resident.weights - sum(sizes)
    assert (streamed.slots, streamed.weights_on_host) == (3 * max(packed), sum(packed))
    # Evenly spread: the second block of each kind.
    assert half.weights_on_host == packed[1] + packed[3]
    rows, numbers = sum(weight.shape[0] for weight in quantised), sum(weight.numel() for weight in quantised)
    assert resident.weights - int8.weights == numbers * (2 - 1) - rows * 4
    assert resident.weights - nf4.weights == numbers * 2 - numbers // 2 - numbers // 64 * 4
    assert streamed.step == half.step == resident.step
    # While one layer computes, its weight is there as it was.
    assert int8.step.peak - resident.step.peak <= max(weight.nbytes for weight in quantised)
    assert resident.optimizer == 2 * resident.lora == 2 * resident.gradients
    # A block computes, one arrives, and the room that it arrives in is a third.
    assert sharded.slots == resident.weights - sum(whole) + 3 * max(whole)
    assert averaged == replace(resident, lora=2 * resident.lora)
    assert resident.device == resident.weights + 3 * resident.lora + resident.step.peak


def weights_to_move(block: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in block.parameters() if weight.nbytes >= 64 * 1024]


def test_a_step_on_the_cpu_under_autocast_holds_what_is_counted() -> None:
    settings = replace(
        OFFLOADED, quantize="int8", micro_batch_size=2, accumulates=True, device_type="cpu", min_bytes=None
    )
    with narrow("qwen_image", 2) as (family, release):
        adapter = frozen_adapter(family.empty_transformer())
        counted = counter_of(family, release, adapter).count(settings)
        pixels = release.small_pixels
        held = step_on_cpu(
            family,
            in_int8(family, adapter),
            settings,
            latents_shape=family.latents_shape(*pixels),
            conditioning=conditioning_of(family, release, pixels),
        )
    # Of the norm before the last layer: mean and deviation of 256 tokens, which only the CPU keeps in bf16.
    means = 2 * 2 * 256 * torch.bfloat16.itemsize
    expected = replace(held, kept=held.kept + means, peak=held.peak + counted.gradients)
    assert_same_cost(counted.step, expected)
    with narrow("qwen_image", 2) as (family, release):
        without = counter_of(family, release).count(settings)
    assert counted.weights - without.weights == sum(4 * tensor.numel() for tensor in adapter[0].values())


def frozen_adapter(model: torch.nn.Module) -> LoraFile:
    """One on layers with a LoRA, and on layers without."""
    shapes = {name: layer.weight.shape for name, layer in model.named_modules() if name.endswith(FROZEN)}
    firsts = {f"{name}.lora_A.weight": torch.ones(3, shape[1]) for name, shape in shapes.items()}
    return firsts | {f"{name}.lora_B.weight": torch.ones(shape[0], 3) for name, shape in shapes.items()}, {}


def in_int8(family: ModelFamily, training_adapter: LoraFile) -> torch.nn.Module:
    """What the family trains, under autocast of the CPU, with a LoRA and a frozen adapter."""
    (component,) = family.trained
    model = family.component_class(component).from_config(family.folder.component_config(component))
    for weight in model.requires_grad_(False).parameters():
        weight.data = weight.data.bfloat16()
    layers = tuple(quantizable_layers(model, family.block_lists))
    Quantization(format=Int8(), layers=layers, device=CPU).apply_to(model)
    add_adapter(model, targets(family, model), rank=RANK, alpha=1, dropout=0, seed=0)
    add_training_adapter(model, *training_adapter)
    forward = torch.autocast("cpu", torch.bfloat16)(model.train().forward)
    model.forward = convert_outputs_to_fp32(forward)  # as accelerate does
    return model
