"""This file predicts how long a training step takes, from its work and a device's speed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy
from diffsynth_lite.core.planning import (
    BlockWork,
    Kernel,
    Kernels,
    MeteredFormat,
    StepWork,
    WorkMeter,
    count_work,
)
from diffsynth_lite.training.planning.device_speed import DeviceSpeed
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.schedule import BlockTime, Sending, simulated
from diffsynth_lite.training.planning.step import StepSettings

_OFFLOADED = BlockStrategy(offload=True)
_ATTENTION_OFFLOADED = BlockStrategy(save_attention="park")
"""What is counted: what else can happen to a block is made up of parts of these."""


class StepTimer:
    """Predicts how long optimizer steps of what a counter counts take on a device.

    Counting takes a second or two; it is done once for what changes the work, which neither the number of
    streamed blocks does nor which blocks a policy selects.

    Args:
        counter: of a model at one size.
        speed: of the device.
        batch_size: samples of an optimizer step; None is one micro-batch, whatever its size.
    """

    def __init__(self, counter: MemoryCounter, speed: DeviceSpeed, *, batch_size: int | None = None) -> None:
        self._counter, self._speed, self._batch_size = counter, speed, batch_size
        self._works: dict[Any, _TimedWork] = {}

    def seconds(self, settings: StepSettings) -> float:
        """Of an optimizer step on one device.

        Raises:
            UserError: ``quantize_skip`` names layers that are not there.
        """
        batch_size = self._batch_size or settings.micro_batch_size
        num_micro_batches = -(-batch_size // settings.micro_batch_size)
        added = (num_micro_batches - 1) * self._passing(3)
        # Clipping reads the gradients twice and writes them once; AdamW reads four numbers and writes three.
        optimizer = self._passing(3) + self._passing(7) + settings.has_average * self._passing(3)
        return num_micro_batches * self._micro_batch(settings) + added + optimizer

    def _passing(self, num_times: int) -> float:
        """Seconds of a kernel that reads or writes as much as the LoRA takes so often."""
        size = num_times * self._counter.lora_bytes
        return self._speed.seconds(Kernels({Kernel("other", torch.float32, 0, size): 1}), "forward")

    def _micro_batch(self, settings: StepSettings) -> float:
        """Seconds of a forward and a backward pass."""
        work, policy, num_blocks = self._work(settings), settings.policy, self._counter.num_blocks
        flags = settings.use_gradient_checkpointing, settings.use_gradient_checkpointing_offload
        blocks = list(self._blocks(work, policy.others.under(*flags)))
        selected = self._blocks(work, policy.selected.under(*flags))
        for place in policy.selection(num_blocks):
            blocks[place] = selected[place]
        return simulated(
            blocks,
            self._speed,
            before=work.before,
            between=work.between,
            weights=self._counter.streamed_bytes(settings) if settings.stream_blocks else {},
            num_slots=settings.stream_slots,
            resident_blocks=settings.resident_blocks,
            prefetched_blocks=settings.prefetched_blocks,
        )

    def _blocks(self, work: "_TimedWork", strategy: BlockStrategy) -> Sequence[BlockTime]:
        """All blocks, if this happened to each."""
        if strategy not in work.blocks:
            plain = self._counted(work, _OFFLOADED)
            saved = self._counted(work, _ATTENTION_OFFLOADED) if strategy.save_attention != "no" else plain
            work.blocks[strategy] = [
                replace(
                    one,
                    recompute=other.recompute if strategy.recompute else 0.0,
                    sent=one.sent * strategy.offload + other.sent * (strategy.save_attention == "park"),
                )
                for one, other in zip(plain, saved, strict=True)
            ]
        return work.blocks[strategy]

    def _work(self, settings: StepSettings) -> "_TimedWork":
        key = tuple(getattr(settings, name) for name in _CHANGES_WORK)
        if key not in self._works:
            self._works[key] = _TimedWork(dict(zip(_CHANGES_WORK, key, strict=True)))
            self._counted(self._works[key], _OFFLOADED)
        return self._works[key]

    def _counted(self, work: "_TimedWork", strategy: BlockStrategy) -> Sequence[BlockTime]:
        """All blocks under one of the strategies that are counted."""
        if strategy not in work.blocks:
            counted = self._count(work, strategy)
            work.before = self._speed.seconds(counted.before, "forward")
            work.between = self._speed.seconds(counted.between, "backward")
            # Most of the blocks are one that stands for more.
            times = {id(block): _time_of(block, self._speed) for block in counted.blocks}
            work.blocks[strategy] = [times[id(block)] for block in counted.blocks]
        return work.blocks[strategy]

    def _count(self, work: "_TimedWork", strategy: BlockStrategy) -> StepWork:
        settings = StepSettings(
            use_gradient_checkpointing_offload=True, policy=BlockPolicy(selected=strategy), **work.settings
        )
        meter = WorkMeter()
        step = self._counter.step_on_meta(settings, meter)
        step.warm_up(settings)
        with MeteredFormat.in_layers_of(step.model, meter):
            return count_work(step.forward, step.backward, step.blocks, meter, repeats=step.repeats)


_CHANGES_NO_WORK = frozenset(
    (
        *("policy", "use_gradient_checkpointing", "use_gradient_checkpointing_offload"),
        *("resident_blocks", "prefetched_blocks", "stream_blocks", "stream_slots"),
        *("accumulates", "has_average"),
    )
)
"""Settings that say which blocks do what, or when, and what is added up here without being counted."""
_CHANGES_WORK = tuple(one.name for one in fields(StepSettings) if one.name not in _CHANGES_NO_WORK)


@dataclass
class _TimedWork:
    """What takes how long under some settings.

    Attributes:
        settings: those that change it.
        before: seconds before the blocks.
        between: seconds between their forward and their backward pass.
        blocks: all of them, by what happens to each.
    """

    settings: dict[str, Any]
    before: float = 0.0
    between: float = 0.0
    blocks: dict[BlockStrategy, Sequence[BlockTime]] = field(default_factory=dict)


def _time_of(block: BlockWork, speed: DeviceSpeed) -> BlockTime:
    return BlockTime(
        forward=speed.seconds(block.forward, "forward"),
        recompute=speed.seconds(block.recompute, "recompute"),
        backward=speed.seconds(block.backward, "backward"),
        sent=tuple(Sending(sent.num_bytes, speed.seconds(sent.after, "forward")) for sent in block.sent),
    )
