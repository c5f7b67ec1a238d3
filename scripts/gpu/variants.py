"""What was never tried on a GPU: compiled blocks, kernels of attention, batch sizes, the host pool.

FLUX.1 dev at 1024 x 1024, all blocks recomputed, random weights of the release's shapes.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from gpu import release_step
from gpu.release_step import measure_config
from gpu.results import Result
from gpu.settings import config_of
from gpu.stage import Case, Stage
from gpu.tables import gibibytes, markdown, measured, percent, seconds_of
from torch.nn.attention import SDPBackend, sdpa_kernel

_RECIPE, _DEVICE_GIB = "flux_lora", 40
_OFFLOAD = "train.use_gradient_checkpointing_offload=true"
_SETTINGS = {
    "as it is": (),
    "compiled blocks": ("train.compile=blocks",),
    "batch 2": ("train.micro_batch_size=2", "train.global_batch_size=2"),
    "batch 4": ("train.micro_batch_size=4", "train.global_batch_size=4"),
    "offload": (_OFFLOAD,),
    "offload, a new host pool each step": (_OFFLOAD,),
}
_KERNELS = {
    "flash attention": SDPBackend.FLASH_ATTENTION,
    "cuDNN attention": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
}


def _measure(name: str, rehearse: bool) -> dict[str, Any]:
    one = ("train.global_batch_size=1", "train.micro_batch_size=1")
    config = config_of(_RECIPE, *one, *_SETTINGS.get(name, ()), rehearse=rehearse)
    scope: AbstractContextManager[Any] = nullcontext()
    if name in _KERNELS:
        scope = sdpa_kernel(SDPBackend.MATH if rehearse else _KERNELS[name])
    with scope:
        values = measure_config(
            config,
            num_steps=1 if rehearse else 7,
            keeps_host_pool="new host pool" not in name,
            has_copies=name.startswith("offload"),
        )
    return values | {"num_samples": config.train.global_batch_size}


def cases(rehearse: bool) -> list[Case]:
    """A case a setting."""
    return [
        Case(name=name, measure=partial(_measure, name, rehearse), device_gib=0 if rehearse else _DEVICE_GIB)
        for name in (*_SETTINGS, *_KERNELS)
    ]


def tables(results: Sequence[Result]) -> list[str]:
    """Time and memory of each setting."""
    rows = [
        {
            "FLUX.1 dev, 1024 x 1024": result.case,
            "s a step": seconds_of(result.values),
            "s a sample": f"{result.values['seconds'] / result.values['num_samples']:.3f}",
            "peak, GiB": gibibytes(result.values["peak_bytes"]),
            "copies next to kernels": percent(result.values["overlap"]),
        }
        for result in measured(results)
    ]
    return [markdown(rows)] if rows else []


STAGE = Stage(
    name="variants",
    question="What do compiled blocks, attention kernels, batch sizes and the kept host pool change?",
    minutes=5,
    cases=cases,
    tables=tables,
    modules=(sys.modules[__name__], release_step),
)
