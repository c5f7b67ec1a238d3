"""This file logs how far a long pass is and when it will end, and reports that to the run it is part of."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, TypeAlias

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0
_TENTH_INTERVAL_S = 1.0

Phase: TypeAlias = Literal["downloading", "reading", "encoding", "loading", "generating", "captioning"]
"""What a run or command does that takes long, besides training."""
Watch: TypeAlias = Callable[[Phase, int, int], None]
"""Takes the phase, what of it is done, and all of it, in bytes of a download; 0 of 0 where that is not known.
What it raises ends the pass."""

_watch: ContextVar[Watch] = ContextVar("watch", default=lambda _phase, _done, _total: None)


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Scope whose passes are reported: each when it begins, and after each of its steps."""
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


def current_watch() -> Watch:
    """What passes that begin here are reported to; it may be called in any thread."""
    return _watch.get()


class ProgressLog:
    """Writes a line to the log at each tenth of a pass, if a tenth takes a second, and every ten seconds.

    Args:
        text: the line, with a %d for the steps that are done and one for all; None only reports.
        total: steps of the pass.
        clock: seconds from any start.
    """

    def __init__(
        self, text: str | None, total: int, *, phase: Phase, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._text = text
        self._total = total
        self._phase: Phase = phase
        self._watch = current_watch()
        self._clock = clock
        self._started = self._reported = clock()
        self._done = 0
        if total:
            self._watch(phase, 0, total)

    def advance(self) -> None:
        """Count one step."""
        self.reach(self._done + 1)

    def reach(self, done: int) -> None:
        """So many steps are done."""
        before, self._done = self._done, done
        self._watch(self._phase, self._done, self._total)
        if self._text is None:
            return
        now = self._clock()
        is_tenth = self._done * 10 // self._total > before * 10 // self._total
        if now - self._reported < (_TENTH_INTERVAL_S if is_tenth else _INTERVAL_S):
            return
        self._reported = now
        elapsed = now - self._started
        rate = self._done / elapsed if elapsed > 0 else float("inf")
        left = (self._total - self._done) / rate
        logger.info(f"{self._text}, %.3g/s, %d s left", self._done, self._total, rate, left)
