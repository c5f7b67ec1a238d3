"""This file predicts how long a training step takes, from its work and a device's speed."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

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
from diffsynth_lite.training.planning.schedule import BlockTime, Sending, simulated, simulated_forward
from diffsynth_lite.training.planning.step import StepSettings

_COUNTED = BlockPolicy(selected=BlockStrategy(offload=True, save_attention="park"))
"""What is counted: whatever else can happen to a block is a part of it, or computes attention once more."""


class StepTimer:
    """Predicts how long optimizer steps of what a counter counts take on a device.

    What the processes of a run exchange is not a part of it.

    Counting takes a second or two; it is done once for what changes the work, which neither the number of
    streamed blocks does nor which blocks a policy selects.

    Args:
        counter: of a model at one size.
        speed: of the device.
        batch_size: samples of an optimizer step; None is one micro-batch, whatever its size.
        num_sharing: devices that share each sample, and so its work.
        attends_again: whether attention runs once more in the backward pass, as that of Ulysses does.
        other_forwards: forward passes without gradients that a micro-batch takes beside its own, on average.
    """

    def __init__(
        self,
        counter: MemoryCounter,
        speed: DeviceSpeed,
        *,
        batch_size: int | None = None,
        num_sharing: int = 1,
        attends_again: bool = False,
        other_forwards: float = 0.0,
    ) -> None:
        self._counter, self._speed, self._other_forwards = counter, speed, other_forwards
        self._batch_size, self._num_sharing, self._attends_again = batch_size, num_sharing, attends_again
        self._works: dict[Any, _TimedWork] = {}

    def seconds(self, settings: StepSettings) -> float:
        """Of an optimizer step on one device.

        Raises:
            UserError: ``quantize_skip`` names layers that are not there.
        """
        batch_size = self._batch_size or settings.micro_batch_size
        num_micro_batches = -(-batch_size // settings.micro_batch_size)
        added = (num_micro_batches - 1) * self._passing(3)
        # Clipping reads the gradients twice and writes them once.
        optimizer = self._passing(3) + self._optimizer() + settings.has_average * self._passing(3)
        return num_micro_batches * self._micro_batch(settings) + added + optimizer

    def _optimizer(self) -> float:
        """Seconds of an optimizer that reads weights, gradients and its state, and writes weights and state.

        In one kernel, as fused AdamW does; what others compute besides, as Muon's products, is not counted.
        """
        return self._passing(3 + 2 * self._counter.optimizer.state_bytes / self._counter.lora_bytes)

    def _passing(self, num_times: float) -> float:
        """Seconds of a kernel that reads or writes as much as the LoRA takes so often."""
        size = round(num_times * self._counter.lora_bytes)
        return self._speed.seconds(Kernels({Kernel("other", torch.float32, 0, size): 1}), "forward")

    def _micro_batch(self, settings: StepSettings) -> float:
        """Seconds of a forward and a backward pass, and of what passes without gradients there are."""
        work, policy, num_blocks = self._work(settings), settings.policy, self._counter.num_blocks
        flags = settings.use_gradient_checkpointing, settings.use_gradient_checkpointing_offload
        blocks = list(work.blocks(policy.others.under(*flags)))
        selected = work.blocks(policy.selected.under(*flags))
        for place in policy.selection(num_blocks):
            blocks[place] = selected[place]
        streamed = self._counter.streamed_bytes(settings) if settings.stream_blocks else {}
        # All but these is shared.
        weights = {place: size * self._num_sharing for place, size in streamed.items()}
        whole = simulated(
            blocks,
            self._speed,
            before=work.before,
            between=work.between,
            weights=weights,
            num_slots=settings.stream_slots,
            resident_blocks=settings.resident_blocks,
            prefetched_blocks=settings.prefetched_blocks,
        )
        if self._other_forwards:
            forward = simulated_forward(
                blocks, self._speed, before=work.before, weights=weights, num_slots=settings.stream_slots
            )
            whole += self._other_forwards * forward
        return whole / self._num_sharing

    def _work(self, settings: StepSettings) -> "_TimedWork":
        key = tuple(getattr(settings, name) for name in _CHANGES_WORK)
        if key not in self._works:
            counted = self._count(dict(zip(_CHANGES_WORK, key, strict=True)))
            self._works[key] = _TimedWork(counted, self._speed, attends_again=self._attends_again)
        return self._works[key]

    def _count(self, settings: dict[str, Any]) -> StepWork:
        """A step under some settings, and what is counted of blocks."""
        whole = StepSettings(use_gradient_checkpointing_offload=True, policy=_COUNTED, **settings)
        meter = WorkMeter(self._counter.meta_results)
        step = self._counter.step_on_meta(whole, meter)
        step.warm_up(whole)
        with MeteredFormat.in_layers_of(step.model, meter):
            return count_work(step.forward, step.backward, step.blocks, meter, repeats=step.repeats)


_CHANGES_NO_WORK = frozenset(
    (
        *("policy", "use_gradient_checkpointing", "use_gradient_checkpointing_offload"),
        *("resident_blocks", "prefetched_blocks", "stream_blocks", "stream_slots"),
        *("accumulates", "has_average", "num_shards", "saves_attention"),
    )
)
"""Settings that say which blocks do what, or when, and what is added up here without being counted."""
_CHANGES_WORK = tuple(one.name for one in fields(StepSettings) if one.name not in _CHANGES_NO_WORK)


class _TimedWork:
    """How long the parts of a step take.

    Attributes:
        before: seconds before the blocks.
        between: seconds between their forward and their backward pass.
    """

    def __init__(self, work: StepWork, speed: DeviceSpeed, *, attends_again: bool) -> None:
        self.before, self.between = (
            speed.seconds(work.before, "forward"),
            speed.seconds(work.between, "backward"),
        )
        # Most of the blocks are one that stands for more.
        timed = {
            id(block): _TimedBlock.of(block, speed, attends_again=attends_again) for block in work.blocks
        }
        self._timed = [timed[id(block)] for block in work.blocks]
        self._under: dict[BlockStrategy, list[BlockTime]] = {}

    def blocks(self, strategy: BlockStrategy) -> Sequence[BlockTime]:
        """All blocks, if this happened to each."""
        if strategy not in self._under:
            self._under[strategy] = [block.under(strategy) for block in self._timed]
        return self._under[strategy]


@dataclass(frozen=True, kw_only=True)
class _TimedBlock:
    """What of a block takes how long.

    Attributes:
        recompute: seconds of it.
        recompute_rest: the same where what attention computed was saved.
        inputs: copies of what it was given.
        attention: copies of what its attention computed.
    """

    forward: float
    backward: float
    recompute: float
    recompute_rest: float
    inputs: tuple[Sending, ...]
    attention: tuple[Sending, ...]

    @classmethod
    def of(cls, work: BlockWork, speed: DeviceSpeed, *, attends_again: bool) -> Self:
        """A block that was counted with everything offloaded."""
        attention = Kernels({one: times for one, times in work.forward.items() if one.kind == "attention"})
        sent = [Sending(one.num_bytes, speed.seconds(one.after, "forward")) for one in work.sent]
        num_inputs = sum(not one.after for one in work.sent)  # sent before anything is computed
        return cls(
            forward=speed.seconds(work.forward, "forward"),
            backward=speed.seconds(work.backward, "backward")
            + attends_again * speed.seconds(attention, "recompute"),
            # Attention that could not be saved was counted in the recompute.
            recompute=speed.seconds(work.recompute | attention, "recompute"),
            recompute_rest=speed.seconds(work.recompute, "recompute"),
            inputs=tuple(sent[:num_inputs]),
            attention=tuple(sent[num_inputs:]),
        )

    def under(self, strategy: BlockStrategy) -> BlockTime:
        """The block, if this happened to it."""
        recompute = self.recompute if strategy.save_attention == "no" else self.recompute_rest
        return BlockTime(
            forward=self.forward,
            recompute=recompute if strategy.recompute else 0.0,
            backward=self.backward,
            sent=self.inputs * strategy.offload + self.attention * (strategy.save_attention == "park"),
        )
