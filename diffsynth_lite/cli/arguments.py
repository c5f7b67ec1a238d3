"""This file has the arguments that commands share, such as the config, and words commands so that they can be
typed where the person is: a clone, a wheel, a launcher."""

import argparse
import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffsynth_lite.cli.processes import is_one_of_several, parent_command
from diffsynth_lite.cluster.node import COMMAND_VARIABLE
from diffsynth_lite.config import section_types
from diffsynth_lite.config.messages import in_place_of_flag

PROGRAM = "diffsynth-lite"


def add_config_arguments(parser: argparse.ArgumentParser, **of_config: Any) -> None:
    """``--config``, of which some options may be others, ``--preset`` and ``key=value``."""
    options: dict[str, Any] = {"required": True, "help": "yaml; a bare name is also looked for in configs/"}
    parser.add_argument("--config", metavar="FILE", **options | of_config)
    add_preset_argument(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=500")


def config_words(parsed: argparse.Namespace) -> list[str]:
    """The arguments of :func:`add_config_arguments` as they were given, for a command on the same config."""
    presets = (word for name in parsed.presets for word in ("--preset", name))
    return ["--config", parsed.config, *presets, *parsed.overrides]


def add_preset_argument(parser: argparse.ArgumentParser) -> None:
    """``--preset``, which may be given several times."""
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        dest="presets",
        metavar="NAME",
        help="settings for a goal, on top of the file: likeness, style, motion, few_pictures; repeatable",
    )


def add_serve_argument(parser: argparse.ArgumentParser, *, way: str) -> None:
    """``--serve``, with which a command answers the requests of another program in the way that it does."""
    minutes = 15
    parser.add_argument(
        "--serve",
        type=positive_number,
        nargs="?",
        const=minutes,
        metavar="MINUTES",
        help=f"for programs: {way}, until so many minutes without one (default: {minutes})",
    )


def argument_hint(message: str) -> str:
    """A hint for argparse's message where a flag is a setting, or a yaml is given without ``--config``."""
    sections = {name: model.model_fields for name, model in section_types().items()}
    flags = [word for word in message.split() if word.startswith("--")]
    if message.startswith("unrecognized"):
        instead = [words for flag in flags if (words := in_place_of_flag(flag, sections))]
        settings = [words for words in instead if not words.startswith("--")]
        answers = [words for words in instead if words.startswith("--")]
        if settings:
            answers.insert(0, f"settings are written without dashes: {' '.join(settings)}")
        return "".join(f"; {answer}" for answer in answers)
    files = [word for word in sys.argv[1:] if word.endswith((".yaml", ".yml"))]
    return f"; write --config {files[0]}" if files and "--config" in flags else ""


def positive_count(text: str) -> int:
    """Parse an argument that must be a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text}: a whole number above 0")
    return int(text)


def part_of(text: str) -> tuple[int, int]:
    """Index and number of parts in an argument such as ``3/64``, the index from 0 on."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        last = (
            f"0/{count} to {int(count) - 1}/{count}" if count.isdecimal() and int(count) else "0/64 to 63/64"
        )
        raise argparse.ArgumentTypeError(f"{text}: parts are {last}")
    return int(index), int(count)


def positive_number(text: str) -> float:
    """Parse an argument that must be a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0")
    return value


def command(*words: str, here: Path | None = None) -> str:
    """A command of this program, quoted for a shell, such as ``diffsynth-lite plan --config my.yaml``.

    Args:
        here: folder in which it is typed; None for the one that this process runs in.
    """
    folder = Path(sys.executable).parent
    installed = shutil.which(PROGRAM, path=str(folder))
    if installed is None:
        program = [_as_typed(sys.executable, here), "-m", "diffsynth_lite.cli.main"]
    else:
        program = [_as_typed(installed, here)]
    return shlex.join([*program, *words])


def train_command(
    words: Sequence[str], *, num_processes: int, num_nodes: int = 1, here: Path | None = None
) -> str:
    """The command that trains, in so many processes of this machine, or of each node.

    Args:
        words: after the name of the command.
        here: see :func:`command`.
    """
    if num_nodes == num_processes == 1:
        return command("train", *words, here=here)
    meeting = ["--standalone"]
    if num_nodes > 1:
        meeting = f"--nnodes {num_nodes} --rdzv_backend c10d --rdzv_endpoint FIRST_NODE:29500".split()
    launcher = ["torchrun", *meeting, "--nproc_per_node", str(num_processes)]
    return shlex.join([*launcher, "-m", "diffsynth_lite.cli.train", *words])


def same_command(environment: Mapping[str, str], words: Sequence[str]) -> str | None:
    """The command that started this process, without ``--resume``, which may ask for a new run; None for
    several processes whose launcher is not known.

    Args:
        words: of the command, after the name of this program.
    """
    if on_cluster := environment.get(COMMAND_VARIABLE):
        return on_cluster
    if not is_one_of_several(environment):
        return command(*_without_resume(words))
    # Of torch's agent, which accelerate launch is, too; mpirun may be on another machine.
    launcher = parent_command() if "TORCHELASTIC_RUN_ID" in environment else []
    if len(launcher) > 1 and _as_typed(launcher[1]) != launcher[1]:
        launcher = launcher[1:]  # a script: its interpreter is not typed
    return shlex.join([*map(_as_typed, launcher[:1]), *_without_resume(launcher[1:])]) or None


def _without_resume(words: Sequence[str]) -> list[str]:
    followed = {place + 1 for place, word in enumerate(words) if word == "--resume"}
    return [
        word for place, word in enumerate(words) if place not in followed and not word.startswith("--resume")
    ]


def _as_typed(word: str, here: Path | None = None) -> str:
    """The name of a program, where the shell finds this file by it, or its path from a folder."""
    path, here = Path(word), here or Path.cwd()
    if shutil.which(path.name) == word:
        return path.name
    return str(path.relative_to(here)) if path.is_relative_to(here) else word
