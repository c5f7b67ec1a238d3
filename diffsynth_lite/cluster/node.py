"""This file runs on the nodes of a cluster: it starts commands there, and looks at folders.

It imports nothing of Ray, and nothing that takes long.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from diffsynth_lite import __version__
from diffsynth_lite.errors import UserError, exit_code

_PR_SET_PDEATHSIG = 1
_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")
"""Of a node among those that a launcher started Ray on; a command would take itself for one of several."""
WRONG_INPUT = exit_code(UserError())
"""Exit code of what another try does not mend: a setting, a path, an image."""
COMMAND_VARIABLE = "DIFFSYNTH_LITE_COMMAND"
"""Of the environment of a run on a cluster: the command that somebody typed, for its messages."""


class TaskFailedError(Exception):
    """A command ended with an exit code that another try may mend: killed, out of memory, a lost node."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended.

    Attributes:
        name: of the task.
        node: name of the machine that it ran on; empty where that was lost.
        exit_code: 0, or that of the error.
        last_line: of what it logged.
        output: all that it printed as its result.
    """

    name: str
    node: str
    exit_code: int
    last_line: str
    output: str = ""


def run_command(name: str, words: Sequence[str], folder: str) -> Ended:
    """Run a command of this program in a process of its own, whose memory and device are free when it ends.

    Args:
        words: after the name of the program.
        folder: that it is started in.

    Raises:
        TaskFailedError: it ended in a way that another try may mend.
    """
    last_line, node = "", socket.gethostname()
    with TemporaryFile() as printed:
        module = ["diffsynth_lite.cli.main", *words]
        with start(module, folder, stdout=printed, stderr=subprocess.PIPE) as process:
            for line in process.stderr or ():
                sys.stderr.write(f"{name}: {line}")
                last_line = line.strip() or last_line
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    code = process.returncode
    if code not in (0, WRONG_INPUT):
        raise TaskFailedError(f"exit code {code} on {node}: {last_line}")
    return Ended(name=name, node=node, exit_code=code, last_line=last_line, output=output)


def start(
    module: Sequence[str],
    folder: str,
    *,
    variables: Mapping[str, str] | None = None,
    stdout: IO[bytes] | None = None,
    stderr: int | None = None,
) -> "subprocess.Popen[str]":
    """Start a module of this program, which ends when the process that starts it does.

    Args:
        module: its name, and its arguments.
        variables: of its environment, in addition to those of this process.

    Raises:
        TaskFailedError: this node does not see the folder, and another one may.
    """
    if not Path(folder).is_dir():
        raise TaskFailedError(f"{socket.gethostname()} does not see {folder}; mount a shared folder there")
    inherited = {name: value for name, value in os.environ.items() if name not in _RANKS}
    return subprocess.Popen(
        [sys.executable, "-m", *module],
        cwd=folder,
        env={**inherited, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        preexec_fn=_die_with_parent(),
    )


def _die_with_parent() -> Callable[[], None] | None:
    """What a child calls to be killed with its parent: Ray kills a task, and leaves what that started.

    Not asked to stop: processes that wait for one that is gone would not answer, and keep the lock of the
    run from those that are started in their place.
    """
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return lambda: library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def look(paths: Sequence[str], tokens: Mapping[str, str]) -> tuple[list[str], str]:
    """What a node lacks that the others have, and its version of this package.

    Args:
        paths: of files and folders that are read.
        tokens: files by path, with the text that the first node wrote.

    Returns:
        Paths that are not there, and the folders of files that are not the same.
    """
    missing = [path for path in paths if not Path(path).exists()]
    for path, text in tokens.items():
        try:
            is_same = Path(path).read_text() == text
        except OSError:
            is_same = False
        if not is_same:
            missing.append(str(Path(path).parent))
    return missing, __version__
