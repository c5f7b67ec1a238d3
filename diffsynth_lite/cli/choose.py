"""Choose which LoRA of a run is the one to use: RUN@chosen names it, and convert and publish take it."""

import argparse
from pathlib import Path

from diffsynth_lite.cli.console import print_lines
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import choose, chosen_copy, copy_by_step, find_lora_place, run_of

_EXPLANATION = (
    "The choice is in chosen.json in the run folder. Its LoRA stays, whatever output.keep_adapters is, and "
    "nothing else changes, also for a run that goes on."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``diffsynth-lite choose``."""
    parser.description = f"{parser.description} {_EXPLANATION}"
    parser.add_argument(
        "lora",
        metavar="RUN[@STEP]",
        help="the LoRA, as @1000, @last, @best or @ema of a run folder; without these print the choice",
    )
    parser.add_argument("--clear", action="store_true", help="take the choice in RUN back")


def run(parsed: argparse.Namespace) -> None:
    """Write the choice down, or print it."""
    folder = RunFolder(Path(parsed.lora).expanduser())
    if folder.holds_run():
        if parsed.clear:
            choose(folder, None)
        choice = chosen_copy(folder)
        print_lines(f"{parsed.lora}: {f'step {choice.step}' if choice else 'no LoRA'} was chosen.")
        return
    place = find_lora_place(parsed.lora)
    owner = run_of(place)
    if owner is None or parsed.clear:
        what = "takes the folder of a run" if parsed.clear else "is not a LoRA of a run"
        raise UserError(f"{'--clear ' * parsed.clear}{parsed.lora}: {what}; give RUN or RUN@STEP")
    copy = copy_by_step(owner, place)
    choose(owner, copy)
    print_lines(f"{owner.path}: step {copy.step} was chosen; {copy.path.name} in checkpoints/ stays.")
