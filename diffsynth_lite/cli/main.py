"""The console script ``diffsynth-lite``: what there is to do besides training."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from diffsynth_lite import __version__
from diffsynth_lite.cli import cache, convert, doctor, plan, publish, report, sample
from diffsynth_lite.cli.console import run_command

_COMMANDS = (doctor, plan, report, cache, sample, convert, publish)


def build_parser() -> argparse.ArgumentParser:
    """One subcommand for each module of ``_COMMANDS``."""
    parser = argparse.ArgumentParser(prog="diffsynth-lite", description=__doc__.strip(), allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in _COMMANDS:
        name, summary = module.__name__.rpartition(".")[2], (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code, as of ``train.py``: 0 done, 2 something the user can fix, 3 it had to stop.
    """
    # Subcommands know no intermixed arguments; the overrides stand at the end, or between flags of theirs.
    parsed, rest = build_parser().parse_known_args(arguments)
    takes_overrides = "overrides" in parsed
    flags = [text for text in rest if text.startswith("-") or "=" not in text or not takes_overrides]
    if flags:
        build_parser().error(f"unrecognized arguments: {' '.join(flags)}")
    if takes_overrides:
        parsed.overrides = [*parsed.overrides, *rest]
    is_main = os.environ.get("RANK", "0") == "0"
    run: Callable[[argparse.Namespace], None] = parsed.run
    return run_command(lambda: run(parsed), Console(stderr=True), is_main=is_main)


if __name__ == "__main__":
    sys.exit(main())
