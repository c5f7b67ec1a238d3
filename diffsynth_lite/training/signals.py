"""This file turns a stop signal into a question that the loop asks after each step."""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from diffsynth_lite.errors import RunInterrupted

logger = logging.getLogger(__name__)

_STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]
_SAME_EVENT_S = 2.0
"""A terminal and a launcher may both send the same signal: that is one event."""


class StopRequest:
    """What a stop signal does: before the first step it stops the run, from then on it is a question.

    The same signal once more, later than the same event's echo, quits at once. Another one does not: a
    launcher that Ctrl+C stopped takes seconds to die, and its death sends SIGTERM.
    """

    def __init__(self) -> None:
        self._received_at: dict[int, float] = {}
        self._steps_finish = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch SIGTERM, SIGINT and SIGUSR1 inside the block.

        Raises:
            RunInterrupted: at any place in the block before ``let_steps_finish``.
        """
        before = {number: signal.signal(number, self._receive) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def let_steps_finish(self) -> None:
        """From now on a signal only sets ``asked``."""
        self._steps_finish = True

    @property
    def asked(self) -> bool:
        """Whether this process was asked to stop."""
        return bool(self._received_at)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in self._received_at and now - self._received_at[number] > _SAME_EVENT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        is_first = not self._received_at
        self._received_at.setdefault(number, now)
        if not is_first:
            return
        name = signal.Signals(number).name
        if not self._steps_finish:
            raise RunInterrupted(f"{name} before the first step; the same command starts again, and faster")
        logger.warning("%s: finishing this step, then saving. Once more quits at once.", name)
