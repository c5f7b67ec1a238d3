"""The estimated time of a step."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from narrow_releases import FLUX, QWEN_IMAGE, WAN, conditioning_of, narrow_family

from diffsynth_lite.core.gradient import OFFLOAD, RECOMPUTE, BlockPolicy, BlockStrategy
from diffsynth_lite.core.planning.meters import Work
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.releases.release import Pixels
from diffsynth_lite.training.planning.gpus import gpu_named
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.step_time import StepTimer

NUM_BLOCKS = 8
GPU = gpu_named("RTX 4090")
COPIES_SLOWLY = replace(GPU, bf16=math.inf, bandwidth=math.inf)
CPU = replace(GPU, fp32=0.098 / 0.7, bandwidth=17.5 / 0.85, lanes=10**9)
"""One thread of the machine on which steps were measured, which reached 98 GFLOPS, 17.5 GB/s; no copies."""
AGAIN = StepSettings(min_bytes=0)
OFFLOADED = StepSettings(use_gradient_checkpointing_offload=True, min_bytes=0)
MEASURED = {
    "Qwen-Image": {
        "every block": 1.454,
        "every block, save attention": 1.388,
        "first half": 1.237,
        "offload every block": 1.478,
        "none, micro-batch of 2": 1.923,
        "none, int8": 1.016,
        "every block, int8": 1.489,
    },
    "Wan 2.1 T2V 14B": {
        "every block": 1.445,
        "every block, save attention": 1.345,
        "first half": 1.207,
        "offload every block": 1.455,
        "none, micro-batch of 2": 1.948,
        "none, int8": 1.011,
        "every block, int8": 1.464,
    },
}
"""CPU time of a step, as a part of one that keeps all blocks: docs/benchmarks.md."""


def on_cpu(strategy: BlockStrategy | None = None, **changes: object) -> StepSettings:
    policy = BlockPolicy(selected=strategy or BlockStrategy(recompute=False))
    settings = replace(
        OFFLOADED, mixed_precision="no", dtype=torch.float32, device_type="cpu", min_bytes=None, policy=policy
    )
    return replace(settings, **changes)


SETTINGS = {
    "every block": on_cpu(RECOMPUTE),
    "every block, save attention": on_cpu(BlockStrategy(save_attention="keep")),
    "first half": on_cpu(policy=BlockPolicy(select="first_k", n=NUM_BLOCKS // 2, selected=RECOMPUTE)),
    "offload every block": on_cpu(OFFLOAD),
    "none, micro-batch of 2": on_cpu(micro_batch_size=2),
    "none, int8": on_cpu(quantize="int8"),
    "every block, int8": on_cpu(RECOMPUTE, quantize="int8"),
}


def counter_of(family: ModelFamily, pixels: Pixels) -> MemoryCounter:
    model = family.empty_transformer()
    layers = find_target_layers(
        model, family.default_target_modules, unused_modules=family.unused_modules(model)
    )
    return MemoryCounter(
        family,
        layers,
        rank=16,
        latents_shape=family.latents_shape(*pixels),
        conditioning=conditioning_of(family, pixels),
    )


@pytest.fixture(scope="module", params=MEASURED)
def measured(request: pytest.FixtureRequest) -> Iterator[tuple[str, MemoryCounter]]:
    """The model of a measurement: 8 blocks of 256 channels, in the class of a release."""
    release = next(one for one in (QWEN_IMAGE, WAN) if one.name == request.param)
    pixels = (256, 256, 1) if release is QWEN_IMAGE else (224, 128, 17)
    with narrow_family(release, NUM_BLOCKS) as family:
        yield release.name, counter_of(family, pixels)


@pytest.fixture(scope="module")
def counter() -> Iterator[MemoryCounter]:
    """Of a narrow FLUX.1 on a GPU."""
    with narrow_family(FLUX, 2) as family:
        yield counter_of(family, FLUX.small_pixels)


def test_between_settings_ratios_are_within_8_percent_of_those_measured(
    measured: tuple[str, MemoryCounter],
) -> None:
    name, counter = measured
    seconds = StepTimer(counter, CPU).seconds
    ratios = {row: seconds(settings) / seconds(on_cpu()) for row, settings in SETTINGS.items()}
    assert ratios == pytest.approx(MEASURED[name], rel=0.08)


def test_a_step_takes_what_it_computes_and_reads_at_the_speed_of_its_numbers(counter: MemoryCounter) -> None:
    for settings, itemsize in ((AGAIN, 2), (replace(AGAIN, mixed_precision="no", dtype=torch.float32), 4)):
        cost = counter.count(settings).step
        expected = GPU.seconds(cost.forward + cost.backward, itemsize)
        assert StepTimer(counter, GPU).seconds(settings) == pytest.approx(expected)
    work = Work(flops=10**15, num_bytes=10**12)
    assert GPU.seconds(work, 2) == pytest.approx(1e3 / (0.7 * GPU.bf16) + 1e3 / (0.85 * GPU.bandwidth))
    assert GPU.seconds(work, 4) == pytest.approx(1e3 / (0.7 * GPU.fp32) + 1e3 / (0.85 * GPU.bandwidth))


def test_a_step_takes_as_long_as_its_copies_where_these_take_longer(counter: MemoryCounter) -> None:
    streamed = replace(OFFLOADED, stream_blocks="all")
    count = counter.count(streamed)
    weights, host = sum(counter.streamed_bytes(streamed).values()) - count.slots, count.step.host
    assert min(weights, host) > 0
    slow = StepTimer(counter, COPIES_SLOWLY).seconds
    bus = COPIES_SLOWLY.bus_bytes
    # What is offloaded leaves while weights arrive, and comes back after them.
    assert slow(OFFLOADED) == pytest.approx(2 * host / bus)
    assert slow(replace(AGAIN, stream_blocks="all")) == pytest.approx(2 * weights / bus)
    assert slow(streamed) == pytest.approx((max(weights, host) + weights + host) / bus)
    shared = StepTimer(counter, COPIES_SLOWLY, num_sharing=4)
    assert shared.seconds(streamed) == pytest.approx((max(weights, host / 4) + weights + host / 4) / bus)
    again = StepTimer(counter, COPIES_SLOWLY, other_forwards=0.5)
    assert again.seconds(streamed) == pytest.approx(slow(streamed) + 0.5 * weights / bus)
    # Copies that take less are not waited for.
    quick = StepTimer(counter, replace(GPU, lanes=10**9)).seconds
    assert quick(replace(AGAIN, stream_blocks="all")) == quick(AGAIN)


def test_micro_batches_are_as_many_as_a_step_needs(counter: MemoryCounter) -> None:
    one, four = (StepTimer(counter, GPU, batch_size=size).seconds(AGAIN) for size in (None, 4))
    assert four == pytest.approx(4 * one)
    pairs = replace(AGAIN, micro_batch_size=2)
    # Weights are read once for both.
    assert StepTimer(counter, GPU, batch_size=4).seconds(pairs) < four
    assert StepTimer(counter, GPU, batch_size=3).seconds(pairs) == pytest.approx(
        2 * StepTimer(counter, GPU).seconds(pairs)
    )


def test_the_anchors_of_a_slider_are_half_as_many_as_its_samples(counter: MemoryCounter) -> None:
    timer = StepTimer(counter, GPU, batch_size=4)
    of_one, plain = (timer.seconds(replace(AGAIN, has_anchors=anchors)) for anchors in (True, False))
    assert of_one == pytest.approx(1.5 * plain, rel=0.05)


def test_a_pass_without_gradients_is_a_forward_pass_more(counter: MemoryCounter) -> None:
    plain, more = (StepTimer(counter, GPU, other_forwards=number).seconds(AGAIN) for number in (0, 0.25))
    assert more - plain == pytest.approx(0.25 * GPU.seconds(counter.count(AGAIN).step.forward, 2))


def test_processes_that_share_a_sample_take_a_part_each_and_ulysses_attends_again(
    counter: MemoryCounter,
) -> None:
    unsplit = StepTimer(counter, GPU).seconds(AGAIN)
    ring, ulysses = (
        StepTimer(counter, GPU, num_sharing=2, attends_again=again).seconds(AGAIN) for again in (False, True)
    )
    attention = Work(flops=counter.count(AGAIN).step.forward.attention_flops)
    assert attention.flops > 0
    assert ring == pytest.approx(unsplit / 2)
    assert ulysses == pytest.approx((unsplit + GPU.seconds(attention, 2)) / 2)
