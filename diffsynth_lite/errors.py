"""The ways in which a run ends, their exit codes, who logs them, and how problems are collected."""

import errno
import os
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

_Result = TypeVar("_Result")
_Given = ParamSpec("_Given")


class UserError(ValueError):
    """Something the user can fix: a setting, a path, an item of data, a checkpoint that does not fit.

    The message names the key or file, the value given, and what would do.
    """


class DifferentRunError(UserError):
    """A checkpoint or run folder belongs to a run with other settings or other data."""


class CheckpointError(UserError):
    """A checkpoint that is damaged, or does not fit the run."""


class RunStoppedError(RuntimeError):
    """The run had to stop although its settings were right: non-finite numbers, no memory, a full disk.

    The message states what is safe and how to continue.
    """


class RunDivergedError(RunStoppedError):
    """Losses, gradients or weights of a run are not finite, so its weights are not usable."""


class RunInterrupted(BaseException):
    """Somebody asked the run to stop, and it stopped without losing anything.

    Like KeyboardInterrupt not an ``Exception``: a preview may fail, but not swallow this.
    """


class Problems(list[str]):
    """Problems, one a line, collected so that a user reads all of them at once."""

    def attempt(
        self, work: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
    ) -> _Result | None:
        """The result of a call; None where it raised a UserError, whose text then is a problem."""
        try:
            return work(*args, **kwargs)
        except UserError as error:
            self.append(str(error))
            return None

    def require_none(self) -> None:
        """Check that there is no problem."""
        if self:
            raise UserError(join_lines(list(dict.fromkeys(self))))


EXIT_FINISHED = 0
EXIT_BUG = 1
EXIT_CTRL_C = 130
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (UserError, 2),
    (RunStoppedError, 3),
    (RunInterrupted, 75),
)
_OF_THE_FILE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

ON_EACH_MACHINE = {"on_each_machine": True}
"""``extra`` of the log line about the end of a run: the first process of each machine prints it."""
MAX_LINES = 50
"""Problems that one error lists; the rest is counted."""
_MAX_NAMED = 20
"""Things that one line of a message names; the rest is counted."""


def exit_code(error: BaseException) -> int:
    """The command line's exit code for an error; 1 for a bug of ours, which keeps its traceback."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), EXIT_BUG)


def is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine failed, and not a file: no memory, too many open files, a disk that fails.

    The file may be good, so a run that leaves it out would train on less than it was given. Pillow's own
    errors about damaged files are OSErrors without a number.
    """
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, _OF_THE_FILE)


def lacks_files(error: BaseException) -> bool:
    """Whether a process could open no more files; torch, safetensors and sockets word it differently."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.EMFILE
    text = str(error)
    return os.strerror(errno.EMFILE) in text or "received 0 items of ancdata" in text


def join_names(names: Sequence[str], most: int = _MAX_NAMED) -> str:
    """``names`` joined by semicolons; those past the twentieth, or another number, are only counted."""
    named = "; ".join(names[:most])
    return named if len(names) <= most else f"{named}; and {len(names) - most} more"


def join_lines(lines: Sequence[str]) -> str:
    """``lines`` below each other; those past the fiftieth are only counted."""
    more = len(lines) - MAX_LINES
    return "\n".join([*lines[:MAX_LINES], *([f"and {more} more like these"] if more > 0 else [])])
