"""This file logs how far a long pass over the data is, and when it will end."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_INTERVAL_S = 10.0
_TENTH_INTERVAL_S = 1.0


class ProgressLog:
    """Writes a line to the log at each tenth of a pass, if a tenth takes a second, and every ten seconds.

    Args:
        text: the line, with a %d for the steps that are done and one for all.
        total: steps of the pass.
        clock: seconds from any start.
    """

    def __init__(self, text: str, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = text
        self._total = total
        self._clock = clock
        self._started = self._reported = clock()
        self._done = 0

    def advance(self) -> None:
        """Count one step."""
        self._done += 1
        now = self._clock()
        is_tenth = self._done * 10 // self._total > (self._done - 1) * 10 // self._total
        if now - self._reported < (_TENTH_INTERVAL_S if is_tenth else _INTERVAL_S):
            return
        self._reported = now
        elapsed = now - self._started
        rate = self._done / elapsed if elapsed > 0 else float("inf")
        left = (self._total - self._done) / rate
        logger.info(f"{self._text}, %.3g/s, %d s left", self._done, self._total, rate, left)
