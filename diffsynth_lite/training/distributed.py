"""This file makes what several processes do one decision, and bounds how long they wait for one another."""

import faulthandler
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from diffsynth_lite.errors import RunStoppedError, UserError

logger = logging.getLogger(__name__)

LONG_WAIT = timedelta(hours=6)
"""For what one process does while the others wait: its part of the cache, previews, a checkpoint."""
_DUMP_AT = 0.8
"""Part of the limit after which every process writes down where it is: before the limit ends them."""
_RENEWED_AFTER = 0.05

_Result = TypeVar("_Result")
_Told = TypeVar("_Told")


def on_main_process(accelerator: Accelerator, work: Callable[[], _Result]) -> _Result | None:
    """Do something on the main process while the others wait; when it fails, every process raises.

    Returns:
        The result on the main process, None on the others.

    Raises:
        UserError: what the main process raised; on the others with the same text.
        RunStoppedError: likewise; also on the others when the main process failed in any other way.
    """
    if accelerator.num_processes == 1:
        return work()
    if not accelerator.is_main_process:
        kind, message = broadcast_object_list([None])[0]
        if kind is not None:
            raise UserError(message) if kind == "UserError" else RunStoppedError(message)
        return None
    try:
        result = work()
    except BaseException as error:
        kind = "UserError" if isinstance(error, UserError) else "other"
        broadcast_object_list([(kind, str(error) or type(error).__name__)])
        raise
    broadcast_object_list([(None, "")])
    return result


def on_all_processes(accelerator: Accelerator, work: Callable[[], _Result]) -> list[_Result]:
    """Do a part of something on each process; when one fails, every process raises.

    Returns:
        The results of all processes, the same list on each.

    Raises:
        UserError: what any process raised; on the others with the same text.
        RunStoppedError: likewise; also on the others when a process failed in any other way.
    """
    if accelerator.num_processes == 1:
        return [work()]
    try:
        result = work()
    except BaseException as error:
        kind = "UserError" if isinstance(error, UserError) else "other"
        gather_object([(kind, str(error) or type(error).__name__, None)])
        raise
    outcomes = gather_object([(None, "", result)])
    for kind, message, _ in outcomes:
        if kind is not None:
            raise UserError(message) if kind == "UserError" else RunStoppedError(message)
    return [result for _, _, result in outcomes]


def main_process_first(
    accelerator: Accelerator, work: Callable[[], _Result], tell: Callable[[_Result], _Told]
) -> tuple[_Result, list[_Told]]:
    """Do something on the main process and then on the others, which find done what it has left on the disk.

    Args:
        accelerator: tells processes.
        work: to do.
        tell: what all processes are to know of a process's result.

    Returns:
        The result of this process, and what is told of those of all, the same list on each.

    Raises:
        UserError: what any process raised; on the others with the same text.
        RunStoppedError: likewise; also on the others when a process failed in any other way.
    """
    results = on_main_process(accelerator, lambda: [work()]) or []

    def finish() -> _Told:
        if not results:
            results.append(work())
        return tell(results[0])

    told = on_all_processes(accelerator, finish)
    return results[0], told


class Watchdog:
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
