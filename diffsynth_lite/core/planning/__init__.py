"""What training takes, counted on the meta device: nothing is loaded and nothing computed."""

from diffsynth_lite.core.planning.counts import CountedStep, Repeat, StepBytes, count_step, fewer_blocks
from diffsynth_lite.core.planning.kernels import (
    ON_ALL_DEVICES,
    ON_CUDA,
    CudaAutocast,
    FusedKernels,
    backward_in_scope,
)
from diffsynth_lite.core.planning.meta_results import MetaResults
from diffsynth_lite.core.planning.meters import CountingMeter, HostBackend, IgnoresTensors, LiveBytes
from diffsynth_lite.core.planning.stand_ins import StandIns, one_pixel, zeros_like
from diffsynth_lite.core.planning.work import (
    BlockWork,
    Kernel,
    Kernels,
    MeteredFormat,
    StepWork,
    WorkMeter,
    count_work,
)

__all__ = [
    "ON_ALL_DEVICES",
    "ON_CUDA",
    "BlockWork",
    "CountedStep",
    "CountingMeter",
    "CudaAutocast",
    "FusedKernels",
    "HostBackend",
    "IgnoresTensors",
    "Kernel",
    "Kernels",
    "LiveBytes",
    "MetaResults",
    "MeteredFormat",
    "Repeat",
    "StandIns",
    "StepBytes",
    "StepWork",
    "WorkMeter",
    "backward_in_scope",
    "count_step",
    "count_work",
    "fewer_blocks",
    "one_pixel",
    "zeros_like",
]
