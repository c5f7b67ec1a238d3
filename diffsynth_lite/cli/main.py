"""The console script ``diffsynth-lite``."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from rich.console import Console

from diffsynth_lite import __version__
from diffsynth_lite.cli import (
    cache,
    caption,
    choose,
    convert,
    doctor,
    env,
    init,
    plan,
    prepare,
    publish,
    queue,
    report,
    sample,
    score,
    sweep,
    train,
    ui,
)
from diffsynth_lite.cli.arguments import argument_hint
from diffsynth_lite.cli.console import log_level, run_command
from diffsynth_lite.config.files import did_you_mean

_EXAMPLES = {
    init: "my_pictures --preset likeness",
    caption: "my_pictures --model Qwen/Qwen3-VL-4B-Instruct",
    prepare: "raw --out ready --split-scenes",
    doctor: "--config my.yaml",
    plan: "--config my.yaml --gpu 'RTX 4090' --host-gib 32",
    cache: "fill --config my.yaml",
    train: "--config my.yaml train.steps=1000",
    queue: "add --config my.yaml lora.rank=4,8,16 --go",
    sweep: "my.yaml lora.rank=4,8,16 train.learning_rate=1e-4,2e-4 --steps 500",
    report: "runs/* --serve",
    sample: "--lora runs/mine --prompt 'a red star'",
    score: "runs/mine --lora other.safetensors",
    choose: "runs/mine@40",
    convert: "runs/mine mine.safetensors --to kohya",
    publish: "runs/mine --to user/name --dry-run",
    ui: "my_workspace",
    env: "--json",
}
"""Each command's module, in the order in which a user needs them, with what one may type after its name."""

_DESCRIPTION = (
    "Commands to prepare a training run, to train, to follow it, and to use its LoRA. Several devices train "
    "together under a launcher, which starts train.py (without a clone: -m diffsynth_lite.cli.train): "
    "torchrun --standalone --nproc_per_node 2 train.py --config my.yaml"
)


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line, as all commands do, and not below the whole usage."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.set_defaults(refuse=self.refuse)  # of several, the innermost subcommand's is called

    def error(self, message: str) -> NoReturn:
        message += self._setting_instead(message)
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Exit because of unknown arguments; suggests a known one for the first."""
        message = f"unrecognized arguments: {' '.join(unknown)}"
        close = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
        if close and not self._setting_instead(message):
            message += f"; did you mean {close[0]}?"
        self.error(message)

    def _setting_instead(self, message: str) -> str:
        takes_settings = any(action.dest == "overrides" for action in self._actions)
        return argument_hint(message) if takes_settings else ""


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


def _with_negative_numbers(words: Sequence[str]) -> list[str]:
    """Words in which a flag holds what begins with a minus and a number, which argparse takes for a flag."""
    joined: list[str] = []
    for word in words:
        if joined and re.fullmatch(r"--[a-z]+", joined[-1]) and re.match(r"-\.?\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code, see :func:`run_command`.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = build_parser()
    known = [module.__name__.rpartition(".")[2] for module in _EXAMPLES]
    if words and not words[0].startswith("-") and words[0] not in known:
        hint = did_you_mean(words[0], known).strip() or f"there are {', '.join(known)}"
        parser.error(f"{words[0]}: is not a command; {hint}")
    # Subcommands know no intermixed arguments; the overrides are at the end, or between flags of theirs.
    parsed, rest = parser.parse_known_args(_with_negative_numbers(words))
    takes_overrides = "overrides" in parsed
    flags = [text for text in rest if text.startswith("-") or "=" not in text or not takes_overrides]
    if flags:
        parsed.refuse(flags)
    if takes_overrides:
        parsed.overrides = [*parsed.overrides, *rest]
    run: Callable[[argparse.Namespace], None] = parsed.run
    parsed.words, parsed.console = words, Console(stderr=True)  # train shows its progress below the log
    return run_command(lambda: run(parsed), parsed.console, level=log_level(os.environ))


if __name__ == "__main__":
    sys.exit(main())
