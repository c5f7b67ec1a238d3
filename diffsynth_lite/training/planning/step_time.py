"""This file predicts how long a training step takes, from its work and a device's speed."""

from dataclasses import replace

import torch

from diffsynth_lite.core.gradient import BlockPolicy, BlockStrategy
from diffsynth_lite.core.planning import Kernel, Kernels, MeteredFormat, StepWork, WorkMeter, count_work
from diffsynth_lite.training.planning.device_speed import DeviceSpeed
from diffsynth_lite.training.planning.memory_count import MemoryCounter, StepSettings
from diffsynth_lite.training.planning.schedule import BlockTime, Sending, simulated

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
        self._works: dict[StepSettings, StepWork] = {}
        self._times: dict[tuple[StepSettings, BlockStrategy], list[BlockTime]] = {}
        self._outside: dict[StepSettings, tuple[float, float]] = {}

    def seconds(self, settings: StepSettings) -> float:
        """Of an optimizer step on one device.

        Raises:
            UserError: ``quantize_skip`` names layers that are not there.
        """
        micro_batch = self._micro_batch(settings)
        batch_size = self._batch_size or settings.micro_batch_size
        num_micro_batches = -(-batch_size // settings.micro_batch_size)
        added = (num_micro_batches - 1) * self._speed.seconds(self._passes(1, num_passes=3))
        # Clipping reads the gradients twice and writes them once; AdamW reads four numbers and writes three.
        optimizer = self._speed.seconds(self._passes(4, num_passes=10 + 3 * settings.has_average))
        return num_micro_batches * micro_batch + added + optimizer

    def _passes(self, num_kernels: int, *, num_passes: int) -> Kernels:
        """Kernels that together read or write as much as the LoRA takes so often."""
        size = num_passes * self._counter.lora_bytes // num_kernels
        return Kernels({Kernel("other", torch.float32, 0, size): num_kernels})

    def _micro_batch(self, settings: StepSettings) -> float:
        """Seconds of a forward and a backward pass."""
        policy, num_blocks = settings.policy, self._counter.num_blocks
        flags = settings.use_gradient_checkpointing, settings.use_gradient_checkpointing_offload
        selected = self._block_times(settings, policy.selected.under(*flags))
        others = self._block_times(settings, policy.others.under(*flags))
        chosen = set(policy.selection(num_blocks))
        blocks = [selected[place] if place in chosen else others[place] for place in range(num_blocks)]
        before, between = self._outside[_of_work(settings, _OFFLOADED)]
        return simulated(
            blocks,
            self._speed,
            before=before,
            between=between,
            weights=self._counter.streamed_bytes(settings),
            num_slots=settings.stream_slots,
            resident_blocks=settings.resident_blocks,
            prefetched_blocks=settings.prefetched_blocks,
        )

    def _block_times(self, settings: StepSettings, strategy: BlockStrategy) -> list[BlockTime]:
        """Of all blocks, if this happened to each."""
        key = _of_work(settings, strategy)
        if (key, strategy) not in self._times:
            saves, offloads_attention = strategy.save_attention != "no", strategy.save_attention == "park"
            plain = self._counted(settings, _OFFLOADED)
            saved = self._counted(settings, _ATTENTION_OFFLOADED) if saves else plain
            self._times[key, strategy] = [
                replace(
                    one,
                    recompute=other.recompute if strategy.recompute else 0.0,
                    sent=one.sent * strategy.offload + other.sent * offloads_attention,
                )
                for one, other in zip(plain, saved, strict=True)
            ]
        return self._times[key, strategy]

    def _counted(self, settings: StepSettings, strategy: BlockStrategy) -> list[BlockTime]:
        key = _of_work(settings, strategy)
        if (key, strategy) in self._times:
            return self._times[key, strategy]
        work, seconds = self._work(key), self._speed.seconds
        self._outside[key] = seconds(work.before), seconds(work.between)
        times = {
            id(block): BlockTime(
                forward=seconds(block.forward),
                recompute=seconds(block.recompute),
                backward=seconds(block.backward),
                sent=tuple(Sending(sent.num_bytes, seconds(sent.after)) for sent in block.sent),
            )
            for block in work.blocks
        }
        self._times[key, strategy] = [times[id(block)] for block in work.blocks]
        return self._times[key, strategy]

    def _work(self, settings: StepSettings) -> StepWork:
        if settings not in self._works:
            meter = WorkMeter()
            step = self._counter.step_on_meta(settings, meter)
            step.warm_up(settings)
            with MeteredFormat.in_layers_of(step.model, meter):
                self._works[settings] = count_work(
                    step.forward, step.backward, step.blocks, meter, repeats=step.repeats
                )
        return self._works[settings]


def _of_work(settings: StepSettings, strategy: BlockStrategy) -> StepSettings:
    """The settings as far as they change what is computed, with all blocks treated alike."""
    plain = StepSettings()
    return replace(
        settings,
        policy=BlockPolicy(selected=strategy),
        use_gradient_checkpointing=True,
        use_gradient_checkpointing_offload=True,
        accumulates=plain.accumulates,
        has_average=plain.has_average,
        resident_blocks=plain.resident_blocks,
        prefetched_blocks=plain.prefetched_blocks,
        stream_blocks=plain.stream_blocks,
        stream_slots=plain.stream_slots,
    )
