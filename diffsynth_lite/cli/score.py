"""Score the LoRAs that a run kept, and others next to them, and recommend the best one."""

import argparse
import json
import os
import sys
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
    "previews/scores of the run are not generated again."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite score``."""
    parser.description = f"{parser.description} {_EXPLANATION}"
    parser.add_argument("folder", metavar="RUN", help="the folder of a run, whose kept steps are scored")
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
    folder = RunFolder(Path(parsed.folder).expanduser())
    if not folder.holds_run():
        raise UserError(f"RUN: {parsed.folder} holds no run; name the folder of one")
    if folder.trains():
        raise UserError(
            f"RUN: {parsed.folder} trains, and both would write scores.json; score it when it has ended"
        )
    others = [find_lora(given) for given in parsed.lora]
    config = load_config(folder.resolved_file, parsed.overrides).config
    with importing_libraries():
        join_processes(os.environ, sys.argv)
        from diffsynth_lite.report.scores import read_run_scores
        from diffsynth_lite.sampling.scoring import score_loras

    if config.train.deterministic:
        make_cublas_repeatable()
    hide_progress_bars()
    score_loras(config, folder, others)
    scores = read_run_scores(folder, [])
    assert scores is not None, "they have just been written"
    if parsed.json:
        print_lines(json.dumps(asdict(scores.found), indent=2))
        return
    titles = [column.title for column in scores.table.columns]
    print_table(titles, [dict(zip(titles, row, strict=True)) for row in scores.table.rows])
    print_lines(scores.judgement().text)
