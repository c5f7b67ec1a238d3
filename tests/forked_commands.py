"""Commands that a program starts, forked from it: each finds the libraries there, whose import takes 3 s."""

import faulthandler
import gc
import inspect
import logging
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from processes import reset_warnings

HOLD = "hold"
"""A file in the folder that commands are started in: they begin when it is gone."""
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class ForkedCommand(subprocess.Popen):
    """Runs ``python -m MODULE`` in a fork of this process, and any other command as Popen does."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(args, *rest).arguments
        if [*args[:2]] != [sys.executable, "-m"]:
            super()._execute_child(args, *rest)
            return
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads
            self.pid = os.fork()
        if self.pid == 0:
            _run(args[2:], given)
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))


def _run(words: Sequence[str], given: Mapping[str, Any]) -> NoReturn:
    """Run a module, with what an interpreter of its own would have."""
    code = 1
    try:
        gc.freeze()  # What the other threads had is not closed: its numbers are those of other files now.
        _detach(given)
        while Path(HOLD).exists():
            time.sleep(0.02)
        sys.argv = [*words]
        runpy.run_path(str(sys.modules[words[0]].__file__), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        with suppress(OSError):  # nobody reads it; this fork must end all the same
            if sys.exc_info()[0]:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _detach(given: Mapping[str, Any]) -> None:
    """Take the session, signals, files, folder and environment of the command."""
    if given["start_new_session"]:
        os.setsid()
    faulthandler.disable()
    reset_warnings()
    logging.getLogger().handlers.clear()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for number, pipe in enumerate((given["p2cread"], given["c2pwrite"], given["errwrite"])):
        if pipe != -1:
            os.dup2(pipe, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(given["cwd"] or ".")
    if given["env"] is not None:
        os.environ.clear()
        os.environ.update(given["env"])
