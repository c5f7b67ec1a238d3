"""This file estimates how long a training step takes on a GPU, from its data sheet and the counted step.

A pass takes as long as the slower of two things: its operators, and the copies between device and host memory
at the same time. Operators take the time of their operations, and that of the bytes that they read and write.

No GPU was measured. So seconds are a first estimate, and ratios between settings are more reliable: most
errors here are the same for all of them.
"""

import torch

from diffsynth_lite.core.planning.meters import Work
from diffsynth_lite.training.planning.gpus import Gpu, gpu_of_device
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings


def gpu_here() -> Gpu | None:
    """The first CUDA device of this machine, if there is one."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    return gpu_of_device(device.name, device.total_memory)


class StepTimer:
    """Estimates how long the optimizer steps of a counter take on a card.

    Neither the exchange between the processes of a run nor the optimizer is part of it.

    Args:
        batch_size: samples of an optimizer step; None is one micro-batch of any size.
        num_sharing: devices that share each sample, and so its work.
        attends_again: whether attention runs once more in the backward pass, as that of Ulysses does.
        num_backwards: passes with gradients of each micro-batch.
        other_forwards: forward passes without gradients that each of them takes as well, on average.
    """

    def __init__(
        self,
        counter: MemoryCounter,
        gpu: Gpu,
        *,
        batch_size: int | None = None,
        num_sharing: int = 1,
        attends_again: bool = False,
        num_backwards: int = 1,
        other_forwards: float = 0.0,
    ) -> None:
        self._counter, self._gpu, self._other_forwards = counter, gpu, other_forwards
        self._num_backwards = num_backwards
        self._batch_size, self._num_sharing, self._attends_again = batch_size, num_sharing, attends_again

    def seconds(self, settings: StepSettings) -> float:
        """Of an optimizer step on one device."""
        count, sharing = self._counter.count(settings), self._num_sharing
        streamed, host = 0, count.step.host / sharing
        if settings.stream_blocks:  # weights still in the slots where the direction turns are not copied
            streamed = max(0, sum(self._counter.streamed_bytes(settings).values()) - count.slots)
        forward, backward = count.step.forward, count.step.backward
        if self._attends_again:
            backward += Work(flops=forward.attention_flops)
        computing = self._gpu.seconds(forward, settings.itemsize) / sharing
        fetching = streamed / self._gpu.bus_bytes
        # Offloaded inputs leave in the other direction, and come back in that of the weights.
        sending = host / self._gpu.bus_bytes
        seconds = max(computing, fetching, sending) + self._other_forwards * max(computing, fetching)
        seconds += max(self._gpu.seconds(backward, settings.itemsize) / sharing, fetching + sending)
        batch_size = self._batch_size or settings.micro_batch_size
        if settings.has_anchors:  # of two odd micro-batches one has an anchor less than was counted
            seconds *= 1.5 * settings.micro_batch_size / settings.num_samples
        return -(-batch_size // settings.micro_batch_size) * self._num_backwards * seconds
