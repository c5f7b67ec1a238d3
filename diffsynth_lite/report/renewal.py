"""This file keeps the page of a run up to date while the run goes on, for a hundredth of its time at most."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diffsynth_lite.errors import DifferentRunError
from diffsynth_lite.report.page import is_current_page, write_report
from diffsynth_lite.run_folder.folder import RunFolder

logger = logging.getLogger(__name__)

_EVERY_S = 20.0
_WAITED_MULTIPLE = 100
"""Times as long as a page took to write, the next one waits: what it reads grows with the run."""


class PageRenewal:
    """Writes the page of a run now and then, and once when the run has ended.

    A page is never worth the run: whatever goes wrong with it is one warning.

    Args:
        folder: of the run.
        is_main: the other processes write nothing.
        clock: seconds, from any beginning on.
    """

    def __init__(self, folder: Path, *, is_main: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._is_main = is_main
        self._clock = clock
        self._due_at = clock() + _EVERY_S
        self._failed = False

    def renew(self) -> None:
        """Write the page, unless that was done just now."""
        if self._clock() >= self._due_at:
            self._write()

    def restore(self) -> None:
        """Write the page of a run that has ended, where it was removed, or an earlier version wrote it."""
        if not is_current_page(RunFolder(self._folder).report_file):
            self._write()

    @contextmanager
    def concluded(self) -> Iterator[None]:
        """Scope of a run, after which the page says how it ended.

        A run that turns out to be a different one leaves the page as it was.
        """
        try:
            yield
        except DifferentRunError:
            raise
        except BaseException:
            self._write()
            raise
        self._write()

    def _write(self) -> None:
        if not self._is_main or not self._folder.is_dir():
            return
        started_at = self._clock()
        try:
            write_report(self._folder)
        except Exception as error:  # a page is never worth the run: a full disk, a file that nobody foresaw
            if not self._failed:
                logger.warning(
                    "The page of the run could not be written, and nothing else is lost: %s",
                    error,
                    exc_info=not isinstance(error, OSError),
                )
            self._failed = True
        now = self._clock()
        self._due_at = now + max(_EVERY_S, _WAITED_MULTIPLE * (now - started_at))
