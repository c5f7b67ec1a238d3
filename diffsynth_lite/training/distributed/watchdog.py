"""This file bounds how long processes wait for one another, shows where one hangs, and detects lost ones."""

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
"""Limit of the work of one process while the others wait: its part of the cache, previews, a checkpoint."""
_DUMP_AT = 0.8
"""Part of the limit after which every process writes its stacks: before the limit ends them."""
_RESET_AFTER = 0.05
"""Part of the limit: a reset sooner after the last one is left out, as each starts a thread."""


class Watchdog:
    """Finds a process that hangs in a step, and shows where.

    In a step that takes longer than the limit, each process first writes the stacks of its threads to the
    standard error; then torch gives up waiting, so that the run ends with an error instead of hanging for
    ever. A single process only writes its stacks.
    """

    def __init__(self, accelerator: Accelerator, limit: timedelta) -> None:
        self._accelerator = accelerator
        self._limit = limit
        self._reset_at = -math.inf

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Scope of the training loop; ``reset`` begins each step's time."""
        self._set_timeout(self._limit)
        self._begin()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._set_timeout(LONG_WAIT)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Scope of work that may take longer than a step: a save, an evaluation."""
        faulthandler.cancel_dump_traceback_later()
        self._set_timeout(LONG_WAIT)
        try:
            yield
        finally:
            self._set_timeout(self._limit)
            self._begin()

    def reset(self) -> None:
        """Begin the time of the next step."""
        now, limit_s = time.monotonic(), self._limit.total_seconds()
        if now - self._reset_at < _RESET_AFTER * limit_s or sys.__stderr__ is None:
            return
        self._reset_at = now
        faulthandler.dump_traceback_later(_DUMP_AT * limit_s, file=sys.__stderr__)

    def _begin(self) -> None:
        self._reset_at = -math.inf
        self.reset()

    def _set_timeout(self, limit: timedelta) -> None:
        if self._accelerator.num_processes > 1:
            limit_waits(limit)


def limit_waits(limit: timedelta, group: torch.distributed.ProcessGroup | None = None) -> None:
    """Set how long the processes of a group, or of all, wait for one another."""
    # torch has no public way to change it, and offers this one in its own debugger.
    set_timeout = getattr(torch.distributed.distributed_c10d, "_set_pg_timeout", None)
    if set_timeout is None:
        logger.debug("torch %s cannot change how long processes wait.", torch.__version__)
        return
    set_timeout(limit, group)


def is_lost_process(error: RuntimeError) -> bool:
    """Whether an exchange between processes failed: one has ended or hangs, or cannot be reached.

    NCCL and torch's store have a class for it; gloo raises a plain RuntimeError that names its own sources.
    """
    return isinstance(error, torch.distributed.DistError) or "/gloo/" in str(error)
