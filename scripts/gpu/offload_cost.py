"""What each way to save memory costs in seconds, and how much of the copying ran next to kernels.

Qwen-Image at 1024 x 1024 and Wan 2.1 14B at 832 x 480 with 81 frames: one sample a step, a LoRA of the
recipe's rank, random weights of the release's shapes.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpu import release_step
from gpu.release_step import measure_config
from gpu.results import Result
from gpu.settings import config_of
from gpu.stage import Case, Stage
from gpu.tables import gibibytes, markdown, measured, percent, seconds_of

_MODELS = {"Qwen-Image": ("qwen_lora", 62, 40), "Wan 2.1 14B": ("wan_t2v_14b_offload", 40, 28)}
"""Recipe of each; GiB, rounded up, of its step with all blocks recomputed, and of its weights."""
_ONE_SAMPLE = ("train.global_batch_size=1", "train.micro_batch_size=1")
CHECKPOINTED = "checkpointed"
_OFFLOAD = "train.use_gradient_checkpointing_offload"
_KEPT = ("train.use_gradient_checkpointing=false", f"{_OFFLOAD}=false")
_WAYS = {
    CHECKPOINTED: (f"{_OFFLOAD}=false",),
    "offload": (f"{_OFFLOAD}=true",),
    "streamed": (f"{_OFFLOAD}=false", "memory.stream_blocks=all"),
    "offload, streamed": (f"{_OFFLOAD}=true", "memory.stream_blocks=all"),
    "int8": (f"{_OFFLOAD}=false", "model.quantize=int8"),
    "nf4": (f"{_OFFLOAD}=false", "model.quantize=nf4"),
    "none": _KEPT,
}
_COPYING = ("offload", "streamed", "offload, streamed")


def _measure(recipe: str, way: str, rehearse: bool) -> dict[str, Any]:
    config = config_of(recipe, *_ONE_SAMPLE, *_WAYS[way], rehearse=rehearse)
    return measure_config(config, num_warmup=1, num_steps=1 if rehearse else 3, has_copies=way in _COPYING)


def cases(rehearse: bool) -> list[Case]:
    """A way of each model, then the next way."""
    return [
        Case(
            name=f"{model}: {way}",
            measure=partial(_measure, recipe, way, rehearse),
            device_gib=0 if rehearse or way not in (CHECKPOINTED, "offload") else device_gib,
            host_gib=0 if rehearse or "streamed" not in way else weights_gib,
            packages=("bitsandbytes",) if way == "nf4" else (),
        )
        for way in _WAYS
        for model, (recipe, device_gib, weights_gib) in _MODELS.items()
    ]


def tables(results: Sequence[Result]) -> list[str]:
    """One of both models, with the time over that of plain checkpointing."""
    seconds = {result.case: result.values["seconds"] for result in measured(results)}
    rows = []
    for result in results:
        model, _, way = result.case.partition(": ")
        row = {"model": model, "memory saving": way}
        if result.outcome == "measured":
            plain = seconds.get(f"{model}: {CHECKPOINTED}")
            row |= {
                "s a step": seconds_of(result.values),
                f"over {CHECKPOINTED}": f"{result.values['seconds'] / plain:.3f}" if plain else "-",
                "peak, GiB": gibibytes(result.values["peak_bytes"]),
                "host memory, GiB": gibibytes(result.values["host_bytes"]),
                "copies next to kernels": percent(result.values["overlap"]),
            }
        else:
            row |= dict.fromkeys(("s a step",), result.reason)
            row |= {f"over {CHECKPOINTED}": "-", "peak, GiB": "-", "host memory, GiB": "-"}
            row |= {"copies next to kernels": "-"}
        rows.append(row)
    return [markdown(rows)] if rows else []


STAGE = Stage(
    name="offload",
    question="Do offload and streaming cost time, and how much of their copying is hidden?",
    minutes=8,
    cases=cases,
    tables=tables,
    modules=(sys.modules[__name__], release_step),
)
