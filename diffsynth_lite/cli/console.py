"""This file sets up what a command prints: log lines, and errors as single lines."""

import logging
from collections.abc import Callable

from rich.console import Console

from diffsynth_lite.errors import EXIT_BUG, EXIT_FINISHED, RunInterrupted, exit_code

logger = logging.getLogger(__name__)


class _ConsoleHandler(logging.Handler):
    """Prints log lines above the progress line, unbroken: a terminal wraps them, a file keeps them whole."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(self.format(record), markup=False, highlight=False, soft_wrap=True)


def configure_logging(console: Console, *, is_main: bool = True) -> None:
    """Our facts and everybody's warnings on the main process; other processes are silent."""
    handler = _ConsoleHandler(console) if is_main else logging.NullHandler()
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("diffsynth_lite").setLevel(logging.INFO)


def exit_code_of(work: Callable[[], None], *, is_main: bool) -> int:
    """Do what a command does.

    Args:
        work: the command.
        is_main: whether this process explains errors.

    Returns:
        The exit code: 0 finished, 2 something the user can fix, 3 it had to stop, 75 stopped by a signal
        after saving. A bug of ours keeps its traceback and exits with 1.
    """
    try:
        work()
    except (Exception, RunInterrupted) as error:
        code = exit_code(error)
        if code == EXIT_BUG:
            raise
        if is_main:
            _explain(error)
        return code
    return EXIT_FINISHED


def _explain(error: BaseException) -> None:
    """One line for each problem, on the error stream."""
    level = logging.WARNING if isinstance(error, RunInterrupted) else logging.ERROR
    for line in str(error).splitlines():
        logger.log(level, "%s", line)
