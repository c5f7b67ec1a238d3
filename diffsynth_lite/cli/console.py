"""This file sets up what a command prints: log lines, and errors as single lines, with secrets masked."""

import gc
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from rich.console import Console

from diffsynth_lite.cli.processes import is_local_main_process, is_main_process
from diffsynth_lite.errors import (
    EXIT_BUG,
    EXIT_CTRL_C,
    EXIT_FINISHED,
    ON_EACH_MACHINE,
    RunInterrupted,
    exit_code,
)
from diffsynth_lite.redaction import Redactor, in_force

logger = logging.getLogger(__name__)

_ERROR_DESCRIPTOR = 2
_IDLE_ADVICE = {
    # That each image processor is the one of Pillow, as we want it to be.
    "transformers.utils.import_utils": "requires torchvision",
    # That products in 4 bits have no kernel on the CPU, which nobody asks it for: weights are made first.
    "bitsandbytes.backends.cpu.ops": "pip install kernels",
    # That attention weights are not returned: diffusers' HiDream asks for them and reads none.
    "transformers.integrations.sdpa_attention": "does not support `output_attentions=True`",
}
"""Warnings of other libraries that nobody should act on: words of them, by their logger."""
_IDLE_WARNINGS = {
    # diffusers 0.42 uses in its own Chroma what it asks others not to use.
    "`FluxPosEmbed` is deprecated": FutureWarning,
    # As the audio autoencoder of diffusers' MiniMax-H3 does with torch.
    "`torch.nn.utils.weight_norm` is deprecated": FutureWarning,
    # Kandinsky 5 norms float32 by weights of bfloat16, as in diffusers.
    "Mismatch dtype between input and weight": UserWarning,
}
"""Warnings that nobody should act on: their first words, and their class."""
_SILENT = logging.CRITICAL + 1


class _RedactingFormatter(logging.Formatter):
    """Masks secrets in the finished line, and so also in arguments and tracebacks."""

    def __init__(self, redactor: Redactor) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor.text(super().format(record))


class _ConsoleHandler(logging.Handler):
    """Prints log lines above the progress line, unbroken: a terminal wraps them, a file keeps them whole."""

    def __init__(self, console: Console, redactor: Redactor, level: int) -> None:
        super().__init__()
        self._console = console
        self._level = level
        self.setFormatter(_RedactingFormatter(redactor))

    def filter(self, record: logging.LogRecord) -> bool:
        is_the_end = ON_EACH_MACHINE.items() <= vars(record).items() and self._level < _SILENT
        return is_the_end or record.levelno >= self._level

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


class _LossyStream:
    """A stream whose reader may be gone: text that it does not accept is dropped."""

    # A signal that interrupts a write logs a line of its own, which the stream refuses as a "reentrant call".
    _LOST = (OSError, RuntimeError)

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(*self._LOST):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(*self._LOST):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy_log() -> Iterator[None]:
    """Scope in which nothing fails for its log: a closed pipe, a terminal that is gone, a full disk under it.

    Only the error stream, where the log is: a command whose result is lost has failed.
    """
    stream = sys.stderr
    if stream is None:  # closed by the shell, as with 2>&-
        _occupy_error_stream()
        yield
        return
    sys.stderr = cast(TextIO, _LossyStream(stream))
    try:
        yield
    finally:
        sys.stderr = stream
        try:
            stream.flush()
        except OSError:
            # The interpreter would try again at its exit, and make 120 of the exit code.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _occupy_error_stream() -> None:
    """Keep its number from the next file that is opened: libraries in C print there, whatever it is."""
    try:
        os.fstat(_ERROR_DESCRIPTOR)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != _ERROR_DESCRIPTOR:
            os.dup2(nowhere, _ERROR_DESCRIPTOR)
            os.close(nowhere)


def log_level(environment: Mapping[str, str]) -> int:
    """Of the lines that a process of a launcher prints.

    The main process prints its facts and everybody's warnings. The first one of each other machine prints
    errors, and how the run ended, so that the log of that machine by itself shows it. The others are
    silent.
    """
    if is_main_process(environment):
        return logging.INFO
    return logging.ERROR if is_local_main_process(environment) else _SILENT


def run_command(work: Callable[[], None], console: Console, *, level: int = logging.INFO) -> int:
    """Run a command, with secrets masked in all that it prints and writes, and no code from a hub.

    A log that takes nothing more, as a pipe into ``head``, stops nothing.

    Args:
        console: where log lines and errors go.
        level: of the lines that are printed; tracebacks of bugs always are.

    Returns:
        The exit code: 0 finished, 2 something the user can fix, 3 it had to stop, 75 stopped by a signal
        after saving, 130 stopped by Ctrl+C with nothing to save.

    Raises:
        SystemExit: with code 1, after a bug of ours, whose traceback any process prints.
    """
    # Read once, when diffusers is imported. We ask for no remote code; now nobody can.
    os.environ["DIFFUSERS_DISABLE_REMOTE_CODE"] = "1"
    redactor = Redactor(os.environ)
    # Our facts and everybody's warnings.
    logging.basicConfig(level=logging.WARNING, handlers=[_ConsoleHandler(console, redactor, level)])
    logging.getLogger("diffsynth_lite").setLevel(logging.INFO)
    for name in _IDLE_ADVICE:
        logging.getLogger(name).addFilter(lambda record: _IDLE_ADVICE[record.name] not in record.getMessage())
    for words, category in _IDLE_WARNINGS.items():
        warnings.filterwarnings("ignore", words, category)
    with in_force(redactor), lossy_log():
        code = EXIT_BUG
        try:
            code = _exit_code_of(work, redactor)
            return code
        finally:
            _leave_process_group(failed=code != EXIT_FINISHED)


def _leave_process_group(*, failed: bool) -> None:
    """End the process group, if there is one, while the interpreter is whole.

    Left to the end of the interpreter, gloo's threads abort the process: one of two that had nothing to do
    any more ended so in 1 of 8 starts, and the launcher took the run for failed. NCCL may wait for the other
    processes, which learn of a failure only when this process has ended.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if failed and distributed.get_backend() != "gloo":
            return
        try:
            distributed.destroy_process_group()
        except RuntimeError as error:  # the others are lost, but the end of the run is logged
            logger.debug("the process group could not be ended: %s", error)


def print_lines(*lines: str) -> None:
    """Print the result of a command; a terminal wraps the lines, a file keeps them whole."""
    console = Console(emoji=False)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> None:
    """Print the columns in which any row has a text, below their names."""
    shown = [name for name in columns if any(row[name] for row in rows)]
    lines = [{name: name for name in shown}, *rows]
    widths = {name: max(len(line[name]) for line in lines) for name in shown}
    print_lines(*("  ".join(line[name].ljust(widths[name]) for name in shown).rstrip() for line in lines))


@contextmanager
def importing_libraries() -> Iterator[None]:
    """Scope of the imports of a command that is its process: what they make stays.

    The garbage collector looks through none of it, neither while it is made, which takes a fifth of the time
    of the imports, nor in any collection after them.
    """
    if "torch" in sys.modules:  # the process is of another program, whose objects are its own
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def hide_progress_bars() -> None:
    """Have diffusers and transformers, which this imports, show none while they load."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


def _exit_code_of(work: Callable[[], None], redactor: Redactor) -> int:
    try:
        work()
    except KeyboardInterrupt:
        logger.warning("stopped by Ctrl+C")
        return EXIT_CTRL_C
    except (Exception, RunInterrupted) as error:
        code = exit_code(error)
        if code == EXIT_BUG:
            # Not left to the interpreter: wandb's hook prints the traceback as it is.
            sys.stderr.write(redactor.text(traceback.format_exc()))
            raise SystemExit(code) from error
        level = logging.WARNING if isinstance(error, RunInterrupted) else logging.ERROR
        for line in str(error).splitlines():
            logger.log(level, "%s", line, extra=ON_EACH_MACHINE)
        return code
    return EXIT_FINISHED
