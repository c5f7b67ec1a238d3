"""What training takes, counted on the meta device: nothing is loaded and nothing computed."""

from diffsynth_lite.core.planning.counts import CountedStep, Repeat, StepCost, count_step, fewer_blocks
from diffsynth_lite.core.planning.kernels import (
    ON_ALL_DEVICES,
    ON_CUDA,
    CudaAutocast,
    FusedKernels,
    backward_in_scope,
)
from diffsynth_lite.core.planning.meters import CountingMeter, HostBackend, LiveBytes, MetaResults, Work
from diffsynth_lite.core.planning.stand_ins import StandIns, one_pixel, zeros_like

__all__ = [
    "ON_ALL_DEVICES",
    "ON_CUDA",
    "CountedStep",
    "CountingMeter",
    "CudaAutocast",
    "FusedKernels",
    "HostBackend",
    "LiveBytes",
    "MetaResults",
    "Repeat",
    "StandIns",
    "StepCost",
    "Work",
    "backward_in_scope",
    "count_step",
    "fewer_blocks",
    "one_pixel",
    "zeros_like",
]
