"""This file bounds how long a step may take: a process that hangs is found, and says where it hung."""

import faulthandler
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator

logger = logging.getLogger(__name__)

LONG_WAIT = timedelta(hours=6)
"""For what one process does while the others wait: its part of the cache, previews, a checkpoint."""
_DUMP_AT = 0.8
"""Part of the limit after which every process writes down where it is: before the limit ends them."""
_RENEWED_AFTER = 0.05


class Patience:
    """How long processes wait for one another in a step.

    In a step that takes longer each process writes the stacks of its threads to the standard error, and then
    torch gives up waiting: the run ends with an error instead of hanging for ever. A single process waits for
    nobody, and only writes its stacks.

    Args:
        accelerator: of the run.
        limit: of one optimizer step.
    """

    def __init__(self, accelerator: Accelerator, limit: timedelta) -> None:
        self._accelerator = accelerator
        self._limit = limit
        self._renewed_at = -math.inf

    @contextmanager
    def with_steps(self) -> Iterator[None]:
        """Scope of the training loop; ``renew`` begins each step's time."""
        self._set_timeout(self._limit)
        self._begin()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._set_timeout(LONG_WAIT)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Scope in the loop of what may take as long as it takes."""
        faulthandler.cancel_dump_traceback_later()
        self._set_timeout(LONG_WAIT)
        try:
            yield
        finally:
            self._set_timeout(self._limit)
            self._begin()

    def renew(self) -> None:
        """Begin a step's time anew, as exactly as a twentieth of it: each time starts a thread."""
        now, limit_s = time.monotonic(), self._limit.total_seconds()
        if now - self._renewed_at < _RENEWED_AFTER * limit_s or sys.__stderr__ is None:
            return
        self._renewed_at = now
        faulthandler.dump_traceback_later(_DUMP_AT * limit_s, file=sys.__stderr__)

    def _begin(self) -> None:
        self._renewed_at = -math.inf
        self.renew()

    def _set_timeout(self, limit: timedelta) -> None:
        if self._accelerator.num_processes == 1:
            return
        # torch has no public way to change it, and offers this one in its own debugger.
        set_timeout = getattr(torch.distributed.distributed_c10d, "_set_pg_timeout", None)
        if set_timeout is None:
            logger.debug("torch %s cannot change how long processes wait.", torch.__version__)
            return
        set_timeout(limit)
