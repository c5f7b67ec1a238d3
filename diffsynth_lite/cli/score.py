"""Score the LoRAs that a run kept, and others next to them, and recommend the best one."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from diffsynth_lite.cli.arguments import command
from diffsynth_lite.cli.console import hide_progress_bars, importing_libraries, print_lines
from diffsynth_lite.cli.processes import join_processes
from diffsynth_lite.cli.train import make_cublas_repeatable
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.reading import require_run_file
from diffsynth_lite.sampling.request import find_lora

if TYPE_CHECKING:
    from diffsynth_lite.scores.recommendation import Interval, Recommendation

_EXPLANATION = (
    "Images are generated for captions of held-out items (validation.data=FOLDER where the run held none "
    "out), of training items, and for prompts of what was not taught, of the base, too. "
    "What is there in previews/scores of the run is not generated again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite score``."""
    parser.description = f"{parser.description} {_EXPLANATION}"
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run, whose steps are scored")
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="PATH[:WEIGHT]",
        help="a LoRA of another run or program for the same base model; give it again for more",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example validation.data=kept")


def run(parsed: argparse.Namespace) -> None:
    """Score, and print a table."""
    folder = RunFolder(Path(parsed.run_folder).expanduser())
    if not folder.holds_run():
        raise UserError(f"RUN: {parsed.run_folder} holds no run; name the folder of one")
    others = [find_lora(given) for given in parsed.lora]
    require_run_file(folder.resolved_file)
    config = load_config(folder.resolved_file, parsed.overrides).config
    with importing_libraries():
        join_processes(os.environ, sys.argv)
        from diffsynth_lite.run_folder.loras import lora_copies
        from diffsynth_lite.sampling.scoring import score_loras
        from diffsynth_lite.scores.recommendation import recommend

    if config.train.deterministic:
        make_cublas_repeatable()
    if parsed.json or not Console(stderr=True).is_terminal:
        hide_progress_bars()
    record = score_loras(config, folder, others)
    found = recommend(record, {copy.step for copy in lora_copies(folder.checkpoints_folder)})
    if parsed.json:
        print_lines(json.dumps(asdict(found), indent=2))
        return
    Console(emoji=False, highlight=False).print(_table(found))
    print_lines(*_lines(found, folder))


def _table(found: "Recommendation") -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("LoRA")
    for name in ("learned", "kept", "both", "prompt"):
        table.add_column(name, justify="right")
    table.add_column("")
    for judged in found.columns:
        notes = ["best"] if judged == found.best else ["not distinguished from it"] * (judged in found.same)
        scores = map(_shown, (judged.new, judged.kept, judged.total, judged.prompt))
        name = f"step {judged.step}" if judged.step is not None else judged.column
        table.add_row(name, *scores, "; ".join([*notes, *judged.marks]))
    return table


def _shown(interval: "Interval") -> str:
    ends = "" if interval.low is None else f" ({interval.low:.2f} to {interval.high:.2f})"
    return f"{interval.value:.2f}{ends}"


def _lines(found: "Recommendation", folder: RunFolder) -> list[str]:
    best = found.best
    if best is None:
        return [f"No LoRA is recommended: {found.reason}."]
    name = f"{folder.path}@{best.step}" if best.step is not None else best.column
    same = join_names([one.column for one in found.same])
    lines = [f"Recommended: {name}" + (f"; not distinguished from it: {same}." if same else ".")]
    return [*lines, f"Next: {command('choose', name)}"] if best.step is not None else lines
