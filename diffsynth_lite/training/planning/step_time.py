"""This file estimates how long a training step takes on a GPU, from its data sheet and the counted step.

A pass takes as long as the slower of two things: its operators, and the copies between device and host memory
at the same time. Operators take the time of their operations, and that of the bytes that they read and write.

No GPU was measured. So seconds are a first estimate, and ratios between settings are more reliable: most
errors here are the same for all of them.
"""

from dataclasses import dataclass

import torch

from diffsynth_lite.core.planning import Work
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings

COUNTED_SHARE = 0.9
"""Usable fraction of the free memory of a device. The rest is for uncounted memory: kernels, fragments that
the allocator cannot use; how much these take was not measured on a GPU."""
_FLOPS_RATIO, _MEMORY_RATIO, _BUS_RATIO = 0.7, 0.85, 0.8
"""Assumptions: the parts of a data sheet's numbers that a training step and its copies reach."""
_TRANSFERS = {4: 16e9, 5: 32e9}
"""Bits a second of one lane each way, by the generation of PCI Express; 128 of 130 are data (PCI-SIG)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A graphics card, as its maker describes it.

    Attributes:
        bf16: dense TFLOPS of the tensor cores in bf16, added up in fp32.
        fp32: TFLOPS in fp32.
        bandwidth: of its memory, GB a second.
        pcie: generation of PCI Express.
        source: where the numbers are from.
        device_names: what CUDA calls it, without "NVIDIA", where that is another name.
    """

    name: str
    memory_gib: int
    bf16: float
    fp32: float
    bandwidth: float
    pcie: int
    lanes: int = 16
    source: str
    device_names: tuple[str, ...] = ()

    @property
    def training_gib(self) -> float:
        """Its memory that is assumed to be free for training."""
        return COUNTED_SHARE * self.memory_gib

    def seconds(self, work: Work, itemsize: int) -> float:
        """How long this takes in numbers of so many bytes, as we assume."""
        flops = _FLOPS_RATIO * (self.bf16 if itemsize == 2 else self.fp32) * 1e12
        return work.flops / flops + work.num_bytes / (_MEMORY_RATIO * self.bandwidth * 1e9)

    @property
    def bus_bytes(self) -> float:
        """Bytes a second to host memory, and as many from it, as we assume."""
        return _BUS_RATIO * self.lanes * _TRANSFERS[self.pcie] * 128 / 130 / 8


_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
)
_A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100 = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_GEFORCE = "https://www.nvidia.com/en-us/geforce/graphics-cards"

GPUS = (
    Gpu(
        name="RTX 3060 12GB",
        memory_gib=12,
        bf16=25.5,  # of 101 in fp16 with sparsity, added up in fp16: a quarter
        fp32=12.7,
        bandwidth=360,
        pcie=4,
        source=f"{_GEFORCE}/30-series/rtx-3060-3060ti/",
        device_names=("GeForce RTX 3060",),
    ),
    Gpu(name="RTX 3090", memory_gib=24, bf16=71, fp32=35.6, bandwidth=936, pcie=4, source=_AMPERE),
    Gpu(
        name="RTX 4060 Ti 16GB",
        memory_gib=16,
        bf16=44.1,  # of 353 in fp8 with sparsity: an eighth
        fp32=22.1,
        bandwidth=288,
        pcie=4,
        lanes=8,
        source=f"{_GEFORCE}/40-series/rtx-4060-4060ti/",
        device_names=("GeForce RTX 4060 Ti",),
    ),
    Gpu(
        name="RTX 4070 Ti SUPER",
        memory_gib=16,
        bf16=88.2,  # of 706 in fp8 with sparsity: an eighth
        fp32=44.1,
        bandwidth=672,
        pcie=4,
        source=f"{_GEFORCE}/40-series/rtx-4070-family/",
    ),
    Gpu(name="RTX 4080", memory_gib=16, bf16=97.5, fp32=48.7, bandwidth=716.8, pcie=4, source=_ADA),
    Gpu(name="RTX 4090", memory_gib=24, bf16=165.2, fp32=82.6, bandwidth=1008, pcie=4, source=_ADA),
    Gpu(name="RTX 5080", memory_gib=16, bf16=112.6, fp32=56.3, bandwidth=960, pcie=5, source=_BLACKWELL),
    Gpu(name="RTX 5090", memory_gib=32, bf16=209.5, fp32=104.8, bandwidth=1792, pcie=5, source=_BLACKWELL),
    Gpu(
        name="A100 40GB",
        memory_gib=40,
        bf16=312,
        fp32=19.5,
        bandwidth=1555,
        pcie=4,
        source=_A100,
        device_names=("A100-SXM4-40GB", "A100-PCIE-40GB"),
    ),
    Gpu(
        name="A100 80GB",
        memory_gib=80,
        bf16=312,
        fp32=19.5,
        bandwidth=2039,
        pcie=4,
        source=_A100,
        device_names=("A100-SXM4-80GB",),
    ),
    Gpu(name="A100 80GB PCIe", memory_gib=80, bf16=312, fp32=19.5, bandwidth=1935, pcie=4, source=_A100),
    Gpu(
        name="L40S",
        memory_gib=48,
        bf16=362,
        fp32=91.6,
        bandwidth=864,
        pcie=4,
        source="https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413",
    ),
    Gpu(
        name="H100",
        memory_gib=80,
        bf16=989.5,  # half of the number with sparsity, as of the H200
        fp32=67,
        bandwidth=3350,
        pcie=5,
        source=_H100,
        device_names=("H100 80GB HBM3",),
    ),
    Gpu(
        name="H200",
        memory_gib=141,
        bf16=989.5,
        fp32=67,
        bandwidth=4800,
        pcie=5,
        source=_H200,
    ),
)
ASSUMED_GPU = "RTX 4090"
"""Its ratios order settings where no card is named."""


def gpu_named(name: str) -> Gpu:
    """The card that people, or CUDA, call so; capitals, spaces, "NVIDIA" and "GeForce" do not matter."""
    found = _known(name)
    if found is None:
        raise UserError(f"--gpu {name}: not known; known are {', '.join(gpu.name for gpu in GPUS)}")
    return found


def gpu_here() -> Gpu | None:
    """The first CUDA device of this machine, if there is one and it is known.

    Cards with less memory go by the same names to CUDA, such as GeForce RTX 4060 Ti; these are not known.
    """
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(0)
    found = _known(device.name)
    return found if found and device.total_memory >= found.training_gib * 1024**3 else None


def _known(name: str) -> Gpu | None:
    wanted = _plain(name)
    return next((gpu for gpu in GPUS if wanted in map(_plain, (gpu.name, *gpu.device_names))), None)


def _plain(name: str) -> str:
    words = name.casefold().replace("nvidia", "").replace("geforce", "")
    return "".join(character for character in words if character.isalnum())


class StepTimer:
    """Estimates how long the optimizer steps of a counter take on a card.

    Neither the exchange between the processes of a run nor the optimizer is part of it.

    Args:
        batch_size: samples of an optimizer step; None is one micro-batch of any size.
        num_sharing: devices that share each sample, and so its work.
        attends_again: whether attention runs once more in the backward pass, as that of Ulysses does.
        other_forwards: forward passes without gradients that a micro-batch takes as well, on average.
    """

    def __init__(
        self,
        counter: MemoryCounter,
        gpu: Gpu,
        *,
        batch_size: int | None = None,
        num_sharing: int = 1,
        attends_again: bool = False,
        other_forwards: float = 0.0,
    ) -> None:
        self._counter, self._gpu, self._other_forwards = counter, gpu, other_forwards
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
        return -(-batch_size // settings.micro_batch_size) * seconds
