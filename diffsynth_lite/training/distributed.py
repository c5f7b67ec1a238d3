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
_RESET_AFTER = 0.05
"""Part of the limit: a reset that follows the last one sooner is left out, as each starts a thread."""

_Result = TypeVar("_Result")
_Gathered = TypeVar("_Gathered")


def on_main_process(accelerator: Accelerator, work: Callable[[], _Result]) -> _Result | None:
    """Do something on the main process while the others wait; when it fails, every process raises.

    Returns:
        The result on the main process, None on the others.

    Raises:
        UserError: the main process raised it; on the others with the same text.
        RunStoppedError: the same; on the others also when the main process failed in any other way.
    """
    if accelerator.num_processes == 1:
        return work()
    if not accelerator.is_main_process:
        kind, message = broadcast_object_list([None])[0]
        _raise_as(kind, message)
        return None
    try:
        result = work()
    except BaseException as error:
        broadcast_object_list([_described(error)])
        raise
    broadcast_object_list([(None, "")])
    return result


def on_all_processes(accelerator: Accelerator, work: Callable[[], _Result]) -> list[_Result]:
    """Do a part of something on each process; when one fails, every process raises.

    Returns:
        The results of all processes, the same list on each.

    Raises:
        UserError: some process raised it; on the others with the same text.
        RunStoppedError: the same; on the others also when a process failed in any other way.
    """
    if accelerator.num_processes == 1:
        return [work()]
    try:
        result = work()
    except BaseException as error:
        gather_object([(*_described(error), None)])
        raise
    outcomes = gather_object([(None, "", result)])
    for kind, message, _ in outcomes:
        _raise_as(kind, message)
    return [result for _, _, result in outcomes]


def main_process_first(
    accelerator: Accelerator, work: Callable[[], _Result], gather: Callable[[_Result], _Gathered]
) -> tuple[_Result, list[_Gathered]]:
    """Do something on the main process and then on the others, which find its files on the disk.

    Args:
        accelerator: knows the processes.
        work: to do.
        gather: gives the part of a process's result that all of them get.

    Returns:
        The result of this process, and the gathered parts of all, the same list on each.

    Raises:
        UserError: some process raised it; on the others with the same text.
        RunStoppedError: the same; on the others also when a process failed in any other way.
    """
    results = on_main_process(accelerator, lambda: [work()]) or []

    def finish() -> _Gathered:
        if not results:
            results.append(work())
        return gather(results[0])

    gathered = on_all_processes(accelerator, finish)
    return results[0], gathered


def _described(error: BaseException) -> tuple[str, str]:
    """The kind of an error and its text, for the other processes."""
    return "UserError" if isinstance(error, UserError) else "other", str(error) or type(error).__name__


def _raise_as(kind: str | None, message: str) -> None:
    """Raise the error that another process described, if it had one."""
    if kind is not None:
        raise UserError(message) if kind == "UserError" else RunStoppedError(message)


class Watchdog:
    """Finds a process that hangs in a step, and says where it hangs.

    In a step that takes longer than the limit, each process first writes the stacks of its threads to the
    standard error; then torch gives up waiting, so that the run ends with an error instead of hanging for
    ever. A single process waits for nobody and only writes its stacks.

    Args:
        accelerator: knows how many processes there are.
        limit: of one optimizer step.
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
        """Scope of what may take longer than a step: a save, an evaluation."""
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
        if self._accelerator.num_processes == 1:
            return
        # torch has no public way to change it, and offers this one in its own debugger.
        set_timeout = getattr(torch.distributed.distributed_c10d, "_set_pg_timeout", None)
        if set_timeout is None:
            logger.debug("torch %s cannot change how long processes wait.", torch.__version__)
            return
        set_timeout(limit)
