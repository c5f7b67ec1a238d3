"""Training loops in one process: the trainer, a bare loop, and diffusers' script.

The same mini Qwen-Image, adapter and data for all, in turns, as scripts/benchmarks/peers.py has it. So small
a model shows what a loop costs next to the kernels that it starts. First losses and gradients are compared.
DiffSynth-Studio's loop, which peers.py has on the CPU, is not set up for a GPU.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peers
from gpu.results import Result
from gpu.stage import Case, Stage
from gpu.tables import markdown, measured


def _measure(mode: str, rehearse: bool) -> dict[str, Any]:
    arguments = ["--device", "cpu" if rehearse else "cuda", "--modes", mode]
    options = peers.parse_arguments([*arguments, *(["--quick"] if rehearse else ["--steps", "200"])])
    with tempfile.TemporaryDirectory() as folder:
        peers.make_images(Path(folder))
        with peers.quiet(Path(folder)):
            differences, times = peers.measure(options, Path(folder), mode)
    return {
        "differences": differences,
        "base_seconds": statistics.median(times[peers.BASE]),
        "ratios": {name: peers.ratio_of(values, times[peers.BASE]) for name, values in times.items()},
    }


def cases(rehearse: bool) -> list[Case]:
    """A case a mode."""
    return [Case(name=mode, measure=partial(_measure, mode, rehearse)) for mode in peers.MODES]


def tables(results: Sequence[Result]) -> list[str]:
    """A loop a row, a mode a column."""
    found = measured(results)
    loops = dict.fromkeys(name for result in found for name in result.values["ratios"])
    rows = [{"loop": name, **{result.case: _cell(name, result.values) for result in found}} for name in loops]
    return [markdown(rows)] if rows else []


def _cell(name: str, values: dict[str, Any]) -> str:
    if name == peers.BASE:
        return f"1 (of {1000 * values['base_seconds']:.1f} ms)"
    return str(values["ratios"].get(name, "-"))


STAGE = Stage(
    name="loops",
    question="What does the trainer's loop cost next to a bare loop and to others?",
    minutes=4,
    cases=cases,
    tables=tables,
    modules=(sys.modules[__name__], peers),
)
