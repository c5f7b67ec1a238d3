"""A step's time is made up of what was counted of its blocks, its micro-batches and its optimizer."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from diffsynth_lite.core.gradient import KEEP, OFFLOAD, RECOMPUTE, BlockPolicy, BlockStrategy
from diffsynth_lite.core.planning import BlockWork, Kernel, Kernels, StepWork
from diffsynth_lite.core.planning.work import Sent
from diffsynth_lite.training.optimization.optimizer_state import OptimizerFacts
from diffsynth_lite.training.planning.device_speed import DeviceSpeed
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.step_time import StepTimer

NUM_BLOCKS, LORA_BYTES = 5, 8
SPEED = DeviceSpeed(
    product_flops={torch.float32: 1.0},
    attention_ratio=1.0,
    attention_backward_ratio=1.0,
    memory_bytes=1.0,
    dequantised_bytes=1.0,
    to_host_bytes=1.0,
    to_device_bytes=1.0,
    launch_seconds=dict.fromkeys(("forward", "recompute", "backward"), 0.0),
    is_asynchronous=False,
)
ATTENTION = Counter([Kernel("attention", torch.float32, 30, 0)])
ADAMW = OptimizerFacts(state_bytes=2 * LORA_BYTES, has_average=False)
OPTIMIZER = (3 + 7) * LORA_BYTES
STEP = 1 + NUM_BLOCKS * (100 + 1000) + 2


@dataclass
class Weights:
    """Blocks whose weights take 7 bytes each, in a model with a LoRA of 8."""

    num_blocks = NUM_BLOCKS
    lora_bytes = LORA_BYTES
    optimizer: OptimizerFacts = ADAMW

    def streamed_bytes(self, settings: StepSettings) -> dict[int, int]:
        return dict.fromkeys(range(int(settings.stream_blocks)), 7)


def moving(num_bytes: int) -> Kernels:
    return Counter([Kernel("other", torch.float32, 0, num_bytes)])


class Counted(StepTimer):
    """Blocks of 100 seconds forward and 1000 backward; 90 again, of which 30 are attention."""

    num_counts = 0

    def _count(self, settings: dict[str, Any]) -> StepWork:
        self.num_counts += 1
        block = BlockWork(
            forward=moving(70) + ATTENTION,
            recompute=moving(60),
            backward=moving(1000),
            sent=[Sent(10, Counter()), Sent(4, moving(40)), Sent(1, moving(40))],
        )
        return StepWork(before=moving(1), between=moving(2), blocks=[block] * NUM_BLOCKS)


def settings_of(strategy: BlockStrategy, **changes: Any) -> StepSettings:
    return StepSettings(
        use_gradient_checkpointing_offload=True, policy=BlockPolicy(selected=strategy), **changes
    )


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        (settings_of(KEEP), 0),
        (settings_of(RECOMPUTE), 5 * 90),
        (settings_of(BlockStrategy(save_attention="keep")), 5 * 60),
        # One block's copies are still on the device when they are asked for.
        (settings_of(OFFLOAD), 5 * 90 + (5 + 4) * 10),
        (settings_of(BlockStrategy(save_attention="park")), 5 * 60 + (5 + 4) * 5),
        (settings_of(BlockStrategy(offload=True, save_attention="park")), 5 * 60 + (5 + 4) * 15),
        (replace(settings_of(OFFLOAD), use_gradient_checkpointing_offload=False), 5 * 90),
        (StepSettings(policy=BlockPolicy(select="first_k", n=2)), 2 * 90),
        # Of four, two are in the slots at each turn.
        (settings_of(KEEP, stream_blocks=4), (2 + 2) * 7),
        (settings_of(KEEP, has_average=True), 3 * LORA_BYTES),
    ],
)
def test_a_step_takes_what_its_blocks_do_and_copy(settings: StepSettings, added: int) -> None:
    assert Counted(Weights(), SPEED).seconds(settings) == STEP + OPTIMIZER + added


@pytest.mark.parametrize(("kept", "passes"), [(0, 3), (4, 4), (LORA_BYTES, 5), (4 * LORA_BYTES, 11)])
def test_an_optimizer_reads_and_writes_what_it_keeps(kept: int, passes: int) -> None:
    weights = Weights(optimizer=OptimizerFacts(state_bytes=kept, has_average=False))
    clipping = 3 * LORA_BYTES
    assert Counted(weights, SPEED).seconds(settings_of(KEEP)) == STEP + clipping + passes * LORA_BYTES


def test_micro_batches_are_as_many_as_a_step_needs_and_add_up_their_gradients() -> None:
    timer = Counted(Weights(), SPEED, batch_size=4)
    assert timer.seconds(settings_of(KEEP)) == 4 * STEP + 3 * 3 * LORA_BYTES + OPTIMIZER
    assert timer.seconds(settings_of(KEEP, micro_batch_size=4)) == STEP + OPTIMIZER


def test_processes_that_share_a_sample_take_a_part_each_and_ulysses_attends_again() -> None:
    alone = Counted(Weights(), SPEED).seconds(settings_of(KEEP)) - OPTIMIZER
    ring, ulysses = (
        Counted(Weights(), SPEED, num_sharing=2, attends_again=again).seconds(settings_of(KEEP)) - OPTIMIZER
        for again in (False, True)
    )
    assert (ring, ulysses) == (alone / 2, (alone + NUM_BLOCKS * 30) / 2)


def test_a_pass_without_gradients_is_a_forward_pass_more_and_fetches_streamed_weights() -> None:
    timer = Counted(Weights(), SPEED, batch_size=2, other_forwards=1)
    assert timer.seconds(settings_of(OFFLOAD, micro_batch_size=2)) == (
        Counted(Weights(), SPEED).seconds(settings_of(OFFLOAD)) + 1 + NUM_BLOCKS * 100
    )
    assert timer.seconds(settings_of(KEEP, stream_blocks=4, micro_batch_size=2)) == (
        STEP + (2 + 2) * 7 + OPTIMIZER + 1 + NUM_BLOCKS * 100 + 2 * 7
    )


def test_what_changes_no_work_is_not_counted_again() -> None:
    timer = Counted(Weights(), SPEED)
    for stream_blocks in (0, 3, 5):
        for n in (1, 4):
            policy = BlockPolicy(select="last_k", n=n, selected=BlockStrategy(save_attention="park"))
            timer.seconds(StepSettings(policy=policy, stream_blocks=stream_blocks))
    assert timer.num_counts == 1
    timer.seconds(StepSettings(quantize="int8"))
    assert timer.num_counts == 2
