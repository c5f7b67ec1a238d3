"""The ways in which a run ends before its last step, and the exit code of each."""


class UserError(ValueError):
    """Something the user can fix: a setting, a path, an item of data, a checkpoint that does not fit.

    The message names the key or file, the value given, and what would do.
    """


class RunStoppedError(RuntimeError):
    """The run had to stop although its settings were right: non-finite numbers, no memory, a full disk.

    The message says what is safe and how to go on.
    """


class RunInterrupted(BaseException):
    """Somebody asked the run to stop, and it stopped without losing anything.

    Like KeyboardInterrupt no ``Exception``: a preview may fail, but not swallow this.
    """


EXIT_FINISHED = 0
EXIT_BUG = 1
_EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (UserError, 2),
    (RunStoppedError, 3),
    (RunInterrupted, 75),
)


def exit_code(error: BaseException) -> int:
    """The command line's exit code for an error; 1 for a bug of ours, which keeps its traceback."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), EXIT_BUG)
