"""The shapes of SimpleTuner's published sweep: the same mode, adapter, resolution, batch, precision and rank.

Theirs: ``documentation/experimental/SEGMENTED_CHECKPOINTING.md`` at commit bc8e6ab7, mode layer, bf16, H100,
and the example's ``config.json`` that each row names. Neither is compiled. Their figure is the average of a
run after its warm-up, with the time to fetch data; their optimizer is Lion in some rows, ours AdamW. Weights
are random here.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpu import release_step
from gpu.release_step import measure_config
from gpu.results import Result
from gpu.settings import config_of
from gpu.stage import Case, Stage
from gpu.tables import gibibytes, markdown, measured, seconds_of

_COMMON = (
    *("train.global_batch_size=1", "train.micro_batch_size=1", "lora.target_modules=attention"),
    *("train.use_gradient_checkpointing=true", "train.use_gradient_checkpointing_offload=false"),
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A row of their table.

    Attributes:
        example: folder of their config.
        recipe: ours.
        settings: that make it theirs.
        theirs: seconds a step and GiB.
        device_gib: that it needs here at most.
    """

    example: str
    recipe: str
    settings: tuple[str, ...]
    theirs: tuple[float, float]
    device_gib: float


_SHAPES = {
    "Qwen-Image, 1024 x 1024, rank 8": Shape(
        example="qwen_image.peft-lora",
        recipe="qwen_lora",
        settings=("data.resolutions=[1024]", "lora.rank=8"),
        theirs=(1.202, 41.04),
        device_gib=62,
    ),
    "Krea 2, 512 x 512, rank 64": Shape(
        example="krea2.peft-lora",
        recipe="krea2_lora",
        settings=("data.resolutions=[512]", "lora.rank=64"),
        theirs=(0.371, 30.06),
        device_gib=40,
    ),
    "Wan 2.1 14B, 832 x 480, 81 frames, rank 16, all blocks streamed": Shape(
        example="wan2.1-t2v-14b-480p-single-gpu.peft-lora+ramtorch",
        recipe="wan_t2v_14b_offload",
        settings=("lora.rank=16", "memory.stream_blocks=all"),
        theirs=(7.162, 16.28),
        device_gib=30,
    ),
    "LTX-Video 0.9.5, 768 x 512, 49 frames, rank 16": Shape(
        example="ltxvideo-0.9.5-t2v.peft-lora",
        recipe="ltx_video_0_9_5_lora",
        settings=("data.frame_counts=[49]", "lora.rank=16"),
        theirs=(0.462, 4.21),
        device_gib=10,
    ),
    "Z-Image-Turbo, 1024 x 1024, rank 64": Shape(
        example="z-image-turbo.peft-lora",
        recipe="z_image_turbo_lora",
        settings=("data.resolutions=[1024]", "lora.rank=64"),
        theirs=(0.479, 12.87),
        device_gib=24,
    ),
    "SDXL, 1024 x 1024, LoKr of factor 12": Shape(
        example="sdxl.lycoris-lokr",
        recipe="sdxl_lora",
        settings=("data.resolutions=[1024]", "lora.kind=lokr", "lora.rank=8192", "lora.lokr_factor=12"),
        theirs=(1.080, 6.53),
        device_gib=16,
    ),
}


def _measure(shape: Shape, rehearse: bool) -> dict[str, Any]:
    config = config_of(shape.recipe, *_COMMON, *shape.settings, rehearse=rehearse)
    return measure_config(config, num_warmup=0 if rehearse else 3, num_steps=1 if rehearse else 11)


def cases(rehearse: bool) -> list[Case]:
    """A case a row."""
    return [
        Case(
            name=name,
            measure=partial(_measure, shape, rehearse),
            device_gib=0 if rehearse else shape.device_gib,
        )
        for name, shape in _SHAPES.items()
    ]


def tables(results: Sequence[Result]) -> list[str]:
    """Theirs next to ours, both cards named."""
    rows = []
    for result in measured(results):
        shape = _SHAPES[result.case]
        seconds, gib = shape.theirs
        rows.append(
            {
                "shape": result.case,
                f"here ({result.machine.device}): s a step": seconds_of(result.values),
                "GiB": gibibytes(result.values["peak_bytes"]),
                "SimpleTuner (H100): s a step": f"{seconds:.3f}",
                "its GiB": f"{gib:.1f}",
                "its example": f"`{shape.example}`",
            }
        )
    return [markdown(rows)] if rows else []


STAGE = Stage(
    name="shapes",
    question="How long do the shapes of SimpleTuner's sweep take, and in how much memory?",
    minutes=7,
    cases=cases,
    tables=tables,
    modules=(sys.modules[__name__], release_step),
)
