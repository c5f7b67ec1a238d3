"""Estimate what training takes of device and host memory, and which settings fit, before any download."""

import argparse
import json
import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from diffsynth_lite.cli.arguments import (
    add_config_arguments,
    add_serve_argument,
    config_words,
    positive_count,
    positive_number,
    train_command,
)
from diffsynth_lite.cli.console import importing_libraries, print_lines
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.serving import Requests, standard_lines

if TYPE_CHECKING:
    from diffsynth_lite.training.planning.answer import Answer
    from diffsynth_lite.training.planning.memory_count import MemoryCount
    from diffsynth_lite.training.planning.phases import Phase

logger = logging.getLogger(__name__)

_GIB = 1024**3
_NUM_SHOWN = 3
_SPLIT = (
    "Of each sample a process computes one of {} parts of the tokens. Previews are counted as if each "
    "process generated its own."
)
_REUSED = (
    "Counts reused from earlier plans: {}. They are kept in {}; without that folder all is counted again."
)
_PRESERVED = (
    "{:.0f} % of the samples, if all sources hold as many items, are preserved: a forward pass more each."
)

_SCORED = (
    "Scores: up to {} images of each of {} steps and 64 of the base, in the time of as many previews; then "
    "the models of validation.score_models, one after the other, on the CPU: the default ones take 1.4 GiB."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite plan``."""
    add_config_arguments(parser, required=False)
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
        help="host memory that is free (default: any amount)",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="graphics card, such as 'RTX 4090': which settings fit its memory, and how long a run takes",
    )
    parser.add_argument("--all", action="store_true", help="all settings that fit, not only the fastest")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--require-fit", action="store_true", help="exit with code 2 where it does not fit")
    parser.add_argument(
        "--processes",
        metavar="N",
        type=positive_count,
        default=1,
        help="devices of one machine, each with a process, that train together (default: 1)",
    )
    add_serve_argument(
        parser, way="take requests as lines of JSON on stdin, and answer each part by part on stdout"
    )


def run(parsed: argparse.Namespace) -> None:
    """Count, and print."""
    if parsed.serve is not None:
        _serve(parsed)
        return
    if parsed.config is None:
        raise UserError("--config: is missing; name a yaml, such as --config qwen_lora.yaml")
    loaded = load_config(parsed.config, parsed.overrides, presets=parsed.presets)
    # The libraries take seconds to import: a wrong config is refused before that.
    with importing_libraries():
        from diffsynth_lite.training.planning.answer import Answer
        from diffsynth_lite.training.planning.choices import as_overrides
        from diffsynth_lite.training.planning.kept_counts import KeptCounts
        from diffsynth_lite.training.planning.live_plan import PlanRequest
        from diffsynth_lite.training.planning.planner import RunPlanner
        from diffsynth_lite.training.planning.subject import family_without_weights

    for warning in loaded.warnings:
        logger.warning("%s", warning)
    folder = kept_counts_folder(os.environ)
    given = {key: value for key, value in vars(parsed).items() if key in PlanRequest.model_fields}
    with family_without_weights(loaded.config) as family:
        asked = PlanRequest(**given).input_of(loaded, family)
        if asked.room is None and parsed.require_fit:
            raise UserError("--require-fit: needs a card: give --gpu NAME, or its memory, as --device-gib 24")
        kept = KeptCounts(folder, family)
        answer = Answer(RunPlanner(asked, family, kept), asked)
        if parsed.json:
            print_lines(json.dumps(answer.as_json(), indent=2))
        else:
            _print(Console(emoji=False, highlight=False), answer, shows_all=parsed.all)
            if asked.room is not None and (best := answer.planner.best) is not None:
                config_file, *words = config_words(parsed)[1:]
                words += [] if best.recipe else as_overrides(best.changes)
                words = ["--config", best.recipe or config_file, *words]
                print_lines(f"Next: {train_command(words, num_processes=parsed.processes)}")
            if kept.num_reused:
                print_lines(_REUSED.format(kept.num_reused, folder))
    if parsed.require_fit and not answer.fits:
        raise UserError(f"--require-fit: {answer.verdict}")


def _serve(parsed: argparse.Namespace) -> None:
    given = [parsed.config, parsed.overrides, parsed.presets, parsed.gpu, parsed.device_gib]
    given += [parsed.host_gib, parsed.processes > 1, parsed.all, parsed.json, parsed.require_fit]
    if any(given):
        raise UserError("--serve: takes all else from requests, and answers in JSON; leave out the rest here")
    with standard_lines() as (lines, answers):
        with importing_libraries():
            from diffsynth_lite.training.planning.live_plan import LivePlan, PlanRequest

        requests = Requests(PlanRequest, lines, answers, idle_s=60 * parsed.serve)
        LivePlan(requests, kept_counts_folder(os.environ)).serve()


def kept_counts_folder(environment: Mapping[str, str]) -> Path | None:
    """Where counts are kept, as XDG's base directories have it; None without a home."""
    given = Path(environment.get("XDG_CACHE_HOME", ""))
    with suppress(RuntimeError):
        caches = given if given.is_absolute() else Path("~/.cache").expanduser()
        return caches / "diffsynth_lite" / "plan"
    return None


def _print(console: Console, answer: "Answer", *, shows_all: bool) -> None:
    """Print the answer, then what it is made of."""
    planner, way = answer.planner, answer.planner.as_configured
    print_lines(*answer.lines, "", *_subject_lines(answer))
    console.print(_needs(way.step, num_shards=planner.settings.num_shards))
    if way.uncounted:
        print_lines(way.uncounted)
    else:
        rows = {str(phase.name): (phase.device, phase.host) for phase in way.phases}
        console.print(_table("Peak of each phase, GiB", rows))
        print_lines(_most(way.phases))
    if planner.room is not None:
        print_lines(*_choice_lines(answer, shows_all=shows_all))


def _subject_lines(answer: "Answer") -> Iterator[str]:
    """What is counted, and how."""
    from diffsynth_lite.training.encoding.scored_prompts import NUM_PROMPTS
    from diffsynth_lite.training.planning.subject import preserved_share

    planner, config = answer.planner, answer.planner.config
    yield f"{config.model.family}, {planner.size.name}, micro-batch of {planner.settings.micro_batch_size}"
    if config.train.context_parallel > 1:
        yield _SPLIT.format(config.train.context_parallel)
    if planner.settings.compiles:
        yield "Counted and estimated as with train.compile=off."
    if answer.asked.num_processes > 1:
        yield "What the processes exchange takes time on top."
    if config.validation.scores:
        every = config.score_every_steps or config.train.steps
        yield _SCORED.format(3 * NUM_PROMPTS, -(-config.train.steps // every))
    if share := preserved_share(config):
        yield _PRESERVED.format(100 * share)


def _choice_lines(answer: "Answer", *, shows_all: bool) -> Iterator[str]:
    """Settings of the steps, the fastest first, those of the config among them."""
    planner, choices = answer.planner, answer.planner.choices_and_configured
    others = [choice for choice in choices if not answer.is_configured(choice)]
    shown = others if shows_all else others[: _NUM_SHOWN - 1]
    numbers = "; another model.quantize gives other numbers" if planner.changes_format else ""
    yield f"Settings of a step, the fastest first{numbers}:"
    for choice in choices:
        if not answer.is_configured(choice) and choice not in shown:
            continue
        device, host = (size / _GIB for size in (choice.count.device, choice.count.host))
        seconds = answer.seconds(choice)
        ratio = f"{choice.seconds / choices[0].seconds:.2f} of the first one's time"
        yield f"{device:.1f} GiB, {host:.1f} on the host, {f'{seconds:.3g} s a step' if seconds else ratio}:"
        misses = "" if planner.room and planner.room.fits(choice.count) else ", which does not fit"
        is_own = answer.is_configured(choice)
        yield f"  {f'as the config says{misses}' if is_own else shlex.join(choice.overrides(planner.config))}"
    if len(shown) < len(others):
        yield f"{len(others) - len(shown)} more with --all."


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
