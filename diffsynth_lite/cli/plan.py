"""Estimate what training takes of device and host memory, and which settings fit, before any download."""

import argparse
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from diffsynth_lite.cli.arguments import add_config_arguments, positive_count, positive_number
from diffsynth_lite.cli.console import importing_libraries
from diffsynth_lite.config import Config, load_config
from diffsynth_lite.errors import UserError

if TYPE_CHECKING:
    from diffsynth_lite.training.planning.choices import Choice, MemoryBudget
    from diffsynth_lite.training.planning.gpus import Gpu
    from diffsynth_lite.training.planning.memory_count import MemoryCount
    from diffsynth_lite.training.planning.phases import Phase, PhaseCounter
    from diffsynth_lite.training.planning.step import StepSettings

logger = logging.getLogger(__name__)

_GIB = 1024**3
_SPLIT = (
    "Of each sample a process computes one of {} parts of the tokens. Previews are counted as if each "
    "process generated its own."
)
_REUSED = (
    "{} counts are those of earlier plans, which are kept in {}; without that folder all is counted again."
)
_ESTIMATED = (
    "A step of batch {:g} is estimated to take {:.2f} s on one {}: from its data sheet and the part of it "
    "that we assume is reached, measured on no GPU."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite plan``."""
    add_config_arguments(parser)
    parser.add_argument(
        "--device-gib",
        metavar="GIB",
        type=positive_number,
        help="memory of the device that is free for training; shows which settings fit it",
    )
    parser.add_argument(
        "--host-gib",
        metavar="GIB",
        type=positive_number,
        default=math.inf,
        help="host memory that is free (default: any amount)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="graphics card, such as 'RTX 4090': which settings fit its memory, and how long a step takes",
    )
    parser.add_argument(
        "--processes",
        metavar="N",
        type=positive_count,
        default=1,
        help="devices of one machine, each with a process, that train together (default: 1)",
    )


def run(parsed: argparse.Namespace) -> None:
    """Count, and print."""
    loaded = load_config(parsed.config, parsed.overrides, presets=parsed.presets)
    # The libraries take seconds to import: a wrong config is refused before that.
    with importing_libraries():
        from diffsynth_lite.training.data_settings import plan_rules
        from diffsynth_lite.training.planning.choices import (
            SMALLER_FORMATS,
            MemoryBudget,
            choices_of_first_format,
        )
        from diffsynth_lite.training.planning.gpus import gpu_named
        from diffsynth_lite.training.planning.kept_counts import KeptCounts
        from diffsynth_lite.training.planning.phases import PhaseCounter
        from diffsynth_lite.training.planning.step_time import gpu_here
        from diffsynth_lite.training.planning.subject import (
            counter_of,
            family_without_weights,
            largest_size,
            num_inputs_of,
            preserved_share,
            step_settings,
            timer_of,
        )

    for warning in loaded.warnings:
        logger.warning("%s", warning)
    config, console = loaded.config, Console(emoji=False)
    _require_processes(config, parsed.processes)
    shared, folder = config.train.context_parallel, _cache_folder(os.environ)
    gpu = gpu_here() if parsed.gpu is None else gpu_named(parsed.gpu)
    device_gib = gpu.training_gib if gpu and parsed.device_gib is None else parsed.device_gib
    with family_without_weights(config) as family:
        plan_rules(config, family)  # refuses what no run could do
        kept = KeptCounts(folder, family)
        counter = counter_of(config, family, kept)
        settings = step_settings(config, family, num_processes=parsed.processes)
        size = largest_size(config, family)
        console.print(f"{config.model.family}, {size.name}, micro-batch of {settings.micro_batch_size}")
        console.print(_needs(counter.count(settings), num_shards=settings.num_shards))
        if shared > 1:
            console.print(_SPLIT.format(shared), highlight=False, soft_wrap=True)
        if settings.compiles:
            console.print("Counted and estimated as with train.compile=off.", highlight=False)
        num_inputs = num_inputs_of(config, family)
        phases = PhaseCounter(config, family, counter, size=size, num_inputs=num_inputs)
        _print_phases(console, phases, settings)
        timer = timer_of(config, counter, gpu, num_processes=parsed.processes)
        if gpu:
            preserved = _preserved(preserved_share(config))
            _print_time(console, config, timer.seconds(settings), gpu, parsed.processes, preserved)
        if device_gib is not None:
            host_bytes = parsed.host_gib * _GIB / parsed.processes  # all processes share the host's
            room = MemoryBudget(device=device_gib * _GIB, host=host_bytes, num_sharing=parsed.processes)
            formats = settings.quantize, *SMALLER_FORMATS
            found = choices_of_first_format(counter, timer.seconds, [settings], room, formats)
            _print_choices(console, config, found, gpu, settings, room)
            if found:
                _print_remedies(console, phases, found[0].settings, room)
    if kept.num_reused:
        console.print(_REUSED.format(kept.num_reused, folder), highlight=False, markup=False, soft_wrap=True)


def _cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Where counts are kept, as XDG's base directories have it; None without a home."""
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):
        caches = given if given.is_absolute() else Path("~/.cache").expanduser()
        return caches / "diffsynth_lite" / "plan"
    return None


def _print_time(
    console: Console, config: Config, seconds: float, gpu: "Gpu", num_processes: int, preserved: str
) -> None:
    samples = config.train.global_batch_size * config.train.context_parallel / num_processes
    exchange = " What the processes exchange comes on top." if num_processes > 1 else ""
    text = _ESTIMATED.format(samples, seconds, gpu.name)
    console.print(f"{text}{exchange}{preserved}", highlight=False)


def _preserved(share: float) -> str:
    what = (
        " of its samples, taken as all sources hold as many items, are preserved: a forward pass more each."
    )
    return f" {100 * share:.0f} %{what}" if share else ""


def _require_processes(config: Config, num_processes: int) -> None:
    """Check that there are as many as share something."""
    shards, shared = config.memory.shard_base, config.train.context_parallel
    if shards != "no" and num_processes == 1:
        raise UserError(f"memory.shard_base: {shards} needs several processes: pass --processes 8")
    if num_processes % shared:
        raise UserError(
            f"train.context_parallel: {shared} must divide the processes: pass --processes {shared}"
        )


def _needs(count: "MemoryCount", *, num_shards: int) -> Table:
    weights, visiting = "frozen weights", "slots of streamed weights"
    if num_shards > 1:
        weights, visiting = f"frozen weights, 1 of {num_shards} shards", "gathered of all shards, peak"
    rows: dict[str, tuple[float, float]] = {
        weights: (count.weights, count.weights_on_host),
        visiting: (count.slots, 0),
        "LoRA": (count.lora, 0),
        "its optimizer": (count.optimizer, 0),
        "activations and gradients, peak": (count.step.peak, count.step.host),
        **({"exchanged of split sequences, peak": (count.exchanged, 0)} if count.exchanged else {}),
        "total": (count.device, count.host),
    }
    return _table("Training steps as configured, GiB", rows)


def _print_phases(console: Console, counter: "PhaseCounter", settings: "StepSettings") -> None:
    try:
        phases = counter.count(settings)
    except UserError as error:  # steps were counted all the same
        console.print(str(error), highlight=False, markup=False, soft_wrap=True)
        return
    console.print(_table("Peak of each phase, GiB", {one.name: (one.device, one.host) for one in phases}))
    console.print(_most(phases), highlight=False, soft_wrap=True)


def _print_remedies(
    console: Console, phases: "PhaseCounter", settings: "StepSettings", room: "MemoryBudget"
) -> None:
    """Which other phases do not fit with these settings of the steps, and what would help."""
    from diffsynth_lite.training.planning.choices import as_overrides
    from diffsynth_lite.training.planning.phases import remedies

    try:
        found = list(remedies(phases, settings, room))
    except UserError:  # printed before
        return
    for remedy in found:
        text = f"{remedy.before.name.capitalize()} does not fit: {_sizes(remedy.before)}"
        if remedy.after is None:
            console.print(f"{text}. Nothing is known that would help.", highlight=False, soft_wrap=True)
            continue
        numbers = " and gives other numbers" if remedy.changes_numbers else ""
        text = f"{text}. It takes {_sizes(remedy.after)}{numbers} with:"
        console.print(text, highlight=False, soft_wrap=True)
        console.print(f"  {' '.join(as_overrides(remedy.changes))}", highlight=False, markup=False)
    if not found:
        console.print("With the first of these, all other phases fit, too.")


def _sizes(phase: "Phase") -> str:
    return f"{phase.least_device / _GIB:.1f} GiB, {phase.host / _GIB:.1f} GiB on the host"


def _most(phases: "Sequence[Phase]") -> str:
    largest = max(phases, key=lambda phase: phase.device)
    text = f"The most: {largest.device / _GIB:.1f} GiB on the device, while {largest.name}"
    if largest.least_device < largest.device:
        text += f" (with a VAE in tiles, as it is where that does not fit: {largest.least_device / _GIB:.1f})"
    return text + "."


def _table(title: str, rows: Mapping[str, tuple[float, float]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in ("device", "host"):
        table.add_column(name, justify="right")
    for name, sizes in rows.items():
        table.add_row(name, *(f"{size / _GIB:.2f}" for size in sizes))
    return table


def _print_choices(
    console: Console,
    config: Config,
    found: "Sequence[Choice]",
    gpu: "Gpu | None",
    settings: "StepSettings",
    room: "MemoryBudget",
) -> None:
    """What fits, in place of these settings."""
    if not found:
        host = room.host * room.num_sharing / _GIB
        with_host = "" if math.isinf(host) else f" with {host:g} GiB of host memory"
        console.print(f"Nothing fits {room.device / _GIB:g} GiB{with_host}.")
        return
    console.print(
        "Settings that fit, as arguments of train.py; another model.quantize gives other numbers:"
        if found[0].settings.quantize != settings.quantize
        else "Settings that fit and give the same numbers, as arguments of train.py:",
        soft_wrap=True,
    )
    for choice in found:
        device, host = (size / _GIB for size in (choice.count.device, choice.count.host))
        time = f"{choice.seconds / found[0].seconds:.2f} of the fastest's time"
        if gpu:
            time = f"{choice.seconds:.2f} s a step, {time}"
        console.print(f"{device:.1f} GiB, {host:.1f} GiB on the host, {time}:", highlight=False)
        changes = " ".join(choice.overrides(config)) or "as configured"
        console.print(f"  {changes}", soft_wrap=True, highlight=False, markup=False)
