"""Gradient checkpointing by selection, as in diffusers pull request 10611, next to diffusers' own hook.

LTX-Video 2B with random weights, 512 x 768, 81 frames, batch 1, bfloat16; every weight trains, and gradients
are dropped. Memory is the most that torch allocated in a step, weights included.
"""

import statistics
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import checkpointing
import torch
from checkpointing import Subject
from gpu.results import Result
from gpu.stage import Case, Stage
from gpu.tables import gibibytes, markdown, measured
from meters import EngineMethod, Method, meter_for, take_step, take_turns
from torch import Tensor

from diffsynth_lite.core.gradient import KEEP, RECOMPUTE, BlockPolicy

HOOK = "diffusers' hook, every block"
THEIRS = {
    "none": "1.680, 26.7",
    "every block": "1.358, 9.3",
    "every 2nd": "1.539, 17.7",
    "every 4th": "1.658, 22.2",
}
"""it/s and GB of the pull request, on a card of the class of an A100."""
_EVERY = {"every block": 1, "every 2nd": 2, "every 4th": 4}


class DiffusersHook:
    """The model's own gradient checkpointing, without any code of ours."""

    name = HOOK

    def loss(self, subject: Subject) -> Tensor:
        subject.model.enable_gradient_checkpointing()
        try:
            return subject.loss_of_model()
        finally:
            subject.model.disable_gradient_checkpointing()

    def host_bytes(self) -> int:
        return 0


@cache
def _subject(rehearse: bool) -> Subject:
    device = "cpu" if rehearse else "cuda"
    return Subject(checkpointing.parse_arguments(["--device", device, "--dtype", "bfloat16"]))


def _method(name: str, subject: Subject) -> Method:
    if name == HOOK:
        return DiffusersHook()
    policy = BlockPolicy(selected=KEEP)
    if name in _EVERY:
        policy = BlockPolicy(select="every_n", n=_EVERY[name], selected=RECOMPUTE)
    return EngineMethod(name, policy, subject, meter_for(subject.device))


def _measure(name: str, rehearse: bool) -> dict[str, Any]:
    subject = _subject(rehearse)
    step = partial(take_step, subject, _method(name, subject))
    num_warmup, num_rounds = (0, 1) if rehearse else (3, 15)
    if not rehearse:
        step()
        torch.cuda.reset_peak_memory_stats()
    seconds = take_turns({name: step}, num_warmup=num_warmup, num_rounds=num_rounds)[name]
    return {
        "seconds": statistics.median(seconds),
        "spread": [min(seconds), max(seconds)],
        "peak_bytes": None if rehearse else torch.cuda.max_memory_allocated(),
    }


def cases(rehearse: bool) -> list[Case]:
    """A case a row of the table."""
    return [
        Case(name=name, measure=partial(_measure, name, rehearse), device_gib=0 if rehearse else 32)
        for name in ("none", *_EVERY, HOOK)
    ]


def tables(results: Sequence[Result]) -> list[str]:
    """it/s and GB, as the pull request has them."""
    rows = [
        {
            "recomputed": result.case,
            "it/s": f"{1 / result.values['seconds']:.3f}",
            "GB": gibibytes(result.values["peak_bytes"], unit=1e9),
            "pull request 10611, another card: it/s, GB": THEIRS.get(result.case, "-"),
        }
        for result in measured(results)
    ]
    return [markdown(rows)] if rows else []


STAGE = Stage(
    name="upstream",
    question="What do selections of blocks cost, next to diffusers' own checkpointing?",
    minutes=4,
    cases=cases,
    tables=tables,
    modules=(sys.modules[__name__], checkpointing),
)
