"""What training takes, counted on the meta device: nothing is loaded and nothing computed."""

from diffsynth_lite.core.planning.counts import Repeat, StepBytes, count_step, fewer_blocks
from diffsynth_lite.core.planning.kernels import (
    ON_ALL_DEVICES,
    ON_CUDA,
    CudaAutocast,
    FusedKernels,
    backward_in_scope,
    cast_frozen_inputs,
)
from diffsynth_lite.core.planning.meters import CountingMeter, HostBackend, LiveBytes

__all__ = [
    "ON_ALL_DEVICES",
    "ON_CUDA",
    "CountingMeter",
    "CudaAutocast",
    "FusedKernels",
    "HostBackend",
    "LiveBytes",
    "Repeat",
    "StepBytes",
    "backward_in_scope",
    "cast_frozen_inputs",
    "count_step",
    "fewer_blocks",
]
