"""What `plan` predicts of each recipe, next to what a step takes: bytes and seconds.

A recipe is measured where its card's memory is no more than this one's. The rates at which operations and
bytes pass are fitted on every other recipe, and judged on those between.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gpu import release_step
from gpu.release_step import measure_config
from gpu.results import Result
from gpu.settings import config_of
from gpu.stage import Case, Stage
from gpu.tables import gibibytes, markdown, measured, percent, seconds_of
from recipes import HOSTS, RECIPES

from diffsynth_lite.config import Config
from diffsynth_lite.training.planning.gpus import Gpu
from diffsynth_lite.training.planning.step_time import gpu_here
from diffsynth_lite.training.planning.subject import (
    counter_of,
    family_without_weights,
    step_settings,
    timer_of,
)

_ONE_MICRO_BATCH = ("train.global_batch_size=1", "train.micro_batch_size=1")
_REHEARSED = ("qwen_12gb", "ltx_video_13b_24gb")


def _measure(recipe: str, rehearse: bool) -> dict[str, Any]:
    config = config_of(recipe, *_ONE_MICRO_BATCH, rehearse=rehearse)
    gpu = None if rehearse else gpu_here()
    return _predicted(config, gpu) | measure_config(config, num_warmup=1, num_steps=1 if rehearse else 3)


def _predicted(config: Config, gpu: Gpu | None) -> dict[str, Any]:
    with family_without_weights(config) as family:
        counter, settings = counter_of(config, family), step_settings(config, family)
        count = counter.count(settings)
        forward, backward = count.step.forward, count.step.backward
        num_micro_batches = config.train.global_batch_size // settings.micro_batch_size
        return {
            "predicted_bytes": count.device,
            "predicted_host_bytes": count.host,
            "predicted_seconds": timer_of(config, counter, gpu).seconds(settings)
            if gpu and gpu.is_timed
            else None,
            "tflop": num_micro_batches * (forward.flops + backward.flops) / 1e12,
            "moved_tb": num_micro_batches * (forward.num_bytes + backward.num_bytes) / 1e12,
        }


def _recipes() -> dict[str, int]:
    """Those for cards, with GB of the smallest one that each is for."""
    found: dict[str, int] = {}
    for names in RECIPES.values():
        for card, name in zip(HOSTS, names, strict=True):
            found.setdefault(name, card)
    return {name: card for name, card in found.items() if name != "-"}


def cases(rehearse: bool) -> list[Case]:
    """A case a recipe: those without copies to the host first, which the rates are fitted on."""
    names = dict.fromkeys(_REHEARSED, 0) if rehearse else _recipes()
    return [
        Case(
            name=name,
            measure=partial(_measure, name, rehearse),
            # A card of 80 GB shows a little less to CUDA.
            device_gib=0.95 * card,
            host_gib=min(card, 32),
            packages=() if rehearse or not _in_nf4(name) else ("bitsandbytes",),
        )
        for name, card in sorted(names.items(), key=lambda item: (_copies(item[0]), item[1]))
    ]


def _in_nf4(recipe: str) -> bool:
    return config_of(recipe).model.quantize == "nf4"


def _copies(recipe: str) -> bool:
    config = config_of(recipe)
    return config.train.use_gradient_checkpointing_offload or bool(config.memory.stream_blocks)


def fit_rates(rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Seconds of an operation, in 1e12, and of a byte that operators move, in 1e12, that fit steps best.

    Args:
        rows: with ``tflop``, ``moved_tb`` and ``seconds`` of a step.
    """
    work = np.array([[row["tflop"], row["moved_tb"]] for row in rows])
    seconds = np.array([row["seconds"] for row in rows])
    # Each row weighs the same, however long its step is.
    (flop_s, byte_s), *_ = np.linalg.lstsq(work / seconds[:, None], np.ones(len(rows)), rcond=None)
    return float(flop_s), float(byte_s)


def tables(results: Sequence[Result]) -> list[str]:
    """Predicted and measured, then how far off fitted rates are on recipes that were left out of the fit."""
    found = measured(results)
    if not found:
        return []
    rows = []
    for result in found:
        values = result.values
        predicted_s, peak = values["predicted_seconds"], values["peak_bytes"]
        rows.append(
            {
                "recipe": result.case,
                "predicted, GiB": gibibytes(values["predicted_bytes"]),
                "measured, GiB": gibibytes(peak),
                "bytes off": percent(peak and values["predicted_bytes"] / peak - 1),
                "predicted, s": "-" if predicted_s is None else f"{predicted_s:.2f}",
                "measured, s": seconds_of(values),
                "seconds off": percent(predicted_s and predicted_s / values["seconds"] - 1),
            }
        )
    return [markdown(rows), *_fitted(found)]


def _fitted(found: Sequence[Result]) -> list[str]:
    # Copies bound the others, which these two rates do not have.
    rows = [result.values for result in found if not result.values["host_bytes"]]
    fitted, judged = rows[::2], rows[1::2]
    if len(fitted) < 2 or not judged:
        return []
    flop_s, byte_s = fit_rates(fitted)
    off = [abs((flop_s * row["tflop"] + byte_s * row["moved_tb"]) / row["seconds"] - 1) for row in judged]
    rates = [f"{1 / flop_s:.0f} TFLOP/s" if flop_s > 0 else "operations free"]
    rates += [f"{1 / byte_s:.2f} TB/s" if byte_s > 0 else "bytes free"]
    return [
        f"Fitted on {len(fitted)} recipes without copies to the host, for this card only: "
        f"{' and '.join(rates)}. On the other {len(judged)} the seconds are off by "
        f"{percent(float(np.mean(off)))} on average, {percent(max(off))} at most."
    ]


STAGE = Stage(
    name="prediction",
    question="How far off is plan, in bytes and in seconds?",
    minutes=8,
    cases=cases,
    tables=tables,
    modules=(sys.modules[__name__], release_step),
)
