"""This file words commands so that they can be typed where the person is: a clone, a wheel, a launcher."""

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from diffsynth_lite.cli.processes import is_one_of_several, parent_command

PROGRAM = "diffsynth-lite"


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


def train_command(words: Sequence[str], *, num_processes: int, here: Path | None = None) -> str:
    """The command that trains, in so many processes of this machine.

    Args:
        words: after the name of the command.
        here: see :func:`command`.
    """
    if num_processes == 1:
        return command("train", *words, here=here)
    launcher = ["torchrun", "--standalone", "--nproc_per_node", str(num_processes)]
    return shlex.join([*launcher, "-m", "diffsynth_lite.cli.train", *words])


def same_command(environment: Mapping[str, str], words: Sequence[str]) -> str | None:
    """The command that started this process, without ``--resume``, which may ask for a new run; None for
    several processes whose launcher is not known.

    Args:
        words: of the command, after the name of this program.
    """
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
