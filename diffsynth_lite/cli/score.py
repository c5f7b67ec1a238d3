"""Score the LoRAs that runs kept, and others next to them, and recommend the best one."""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from diffsynth_lite.cli.console import hide_progress_bars, importing_libraries, print_lines, print_table
from diffsynth_lite.cli.processes import join_processes
from diffsynth_lite.cli.train import make_cublas_repeatable
from diffsynth_lite.config import load_config
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.sampling.request import find_lora

_EXPLANATION = (
    "Images are generated for captions of held-out items (validation.data=FOLDER where the run held none "
    "out), of training items, and for prompts of what was not taught, of the base, too. Those in "
    "previews/scores of the run are not generated again. Several runs with the same base, prompts and seeds "
    "are compared in one table."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite score``."""
    parser.description = f"{parser.description} {_EXPLANATION}"
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the folder of a run, whose kept steps are scored"
    )
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
    settings = [word for word in parsed.runs if re.match(r"[\w.]+=", word)]  # argparse takes them for runs
    folders = {name: _checked(name) for name in parsed.runs if name not in settings}
    if not folders:
        raise UserError("RUN: is missing; name the folder of a run")
    others = [find_lora(given) for given in parsed.lora]
    overrides = [*settings, *parsed.overrides]
    configs = [load_config(folder.resolved_file, overrides).config for folder in folders.values()]
    with importing_libraries():
        join_processes(os.environ, sys.argv)
        from diffsynth_lite.sampling.scoring import score_runs

    if any(config.train.deterministic for config in configs):
        make_cublas_repeatable()
    hide_progress_bars()
    best = score_runs(list(zip(folders.values(), configs, strict=True)), others)
    _print(folders, dict(zip(folders, best, strict=True)), as_json=parsed.json)


def _checked(name: str) -> RunFolder:
    folder = RunFolder(Path(name).expanduser())
    if not folder.holds_run():
        raise UserError(f"RUN: {name} holds no run; name the folder of one")
    if folder.trains():
        raise UserError(f"RUN: {name} trains, and both would write scores.json; score it when it has ended")
    return folder


def _print(folders: Mapping[str, RunFolder], best: Mapping[str, int | None], *, as_json: bool) -> None:
    """Print the scores, and refresh the page of each run."""
    from diffsynth_lite.report.page import write_report
    from diffsynth_lite.report.scores import compared_scores, read_run_scores

    pages = [write_report(run.path) for run in folders.values()]
    found = {name: read_run_scores(run, []) for name, run in folders.items()}
    scores = compared_scores({name: each for name, each in found.items() if each})
    if as_json:
        print_lines(json.dumps({**asdict(scores.found), "lora_best": best}, indent=2))
        return
    titles = [column.title for column in scores.table.columns]
    print_table(titles, [dict(zip(titles, row, strict=True)) for row in scores.table.rows])
    kept = [f"{name}@best is step {step}." for name, step in best.items() if step is not None]
    print_lines(scores.judgement().text, *kept, *(f"Page: {page}" for page in pages))
