"""The console script ``diffsynth-lite``: every command except training."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from rich.console import Console

from diffsynth_lite import __version__
from diffsynth_lite.cli import cache, convert, doctor, env, init, plan, publish, report, sample
from diffsynth_lite.cli.arguments import argument_hint
from diffsynth_lite.cli.console import log_level, run_command

_EXAMPLES = {
    init: "my_pictures --preset likeness",
    doctor: "--config my.yaml",
    plan: "--config my.yaml --gpu 'RTX 4090' --host-gib 32",
    cache: "fill --config my.yaml",
    report: "runs/* --serve",
    sample: "--lora runs/mine --prompt 'a red star'",
    convert: "runs/mine mine.safetensors --to kohya",
    publish: "runs/mine --to user/name --dry-run",
    env: "--json",
}
"""Each command's module, in the order in which a user needs them, with what one may type after its name."""

_DESCRIPTION = (
    "Commands to prepare a training run, to follow it, and to use its LoRA. The run "
    "itself: accelerate launch train.py --config my.yaml (without a clone: -m diffsynth_lite.cli.train in "
    "place of train.py)."
)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, as all commands do, and not below the whole usage."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.set_defaults(refuse=self.refuse)  # of several, the innermost subcommand's is called

    def error(self, message: str) -> NoReturn:
        if any(action.dest == "overrides" for action in self._actions):
            message += argument_hint(message)
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit because of unknown arguments; suggests a known one for the first."""
        flag = unknown[0].partition("=")[0]
        close = get_close_matches(flag, self._option_string_actions, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def build_parser() -> argparse.ArgumentParser:
    """One subcommand for each module of ``_EXAMPLES``."""
    parser = _Parser(prog="diffsynth-lite", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module, example in _EXAMPLES.items():
        name, summary = module.__name__.rpartition(".")[2], (module.__doc__ or "").splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(command)
        command.epilog = f"Example: {command.prog} {example}"
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code, as of ``train.py``: 0 done, 2 something the user can fix, 3 it had to stop.
    """
    # Subcommands know no intermixed arguments; the overrides are at the end, or between flags of theirs.
    parsed, rest = build_parser().parse_known_args(arguments)
    takes_overrides = "overrides" in parsed
    flags = [text for text in rest if text.startswith("-") or "=" not in text or not takes_overrides]
    if flags:
        parsed.refuse(flags)
    if takes_overrides:
        parsed.overrides = [*parsed.overrides, *rest]
    run: Callable[[argparse.Namespace], None] = parsed.run
    return run_command(lambda: run(parsed), Console(stderr=True), level=log_level(os.environ))


if __name__ == "__main__":
    sys.exit(main())
