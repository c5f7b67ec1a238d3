"""This file watches the worker processes that read ahead, and ends them when their trainer ends."""

import errno
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.context import SpawnContext
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from diffsynth_lite.errors import lacks_files

_Batch = TypeVar("_Batch")

_SECONDS_AFTER_SIGTERM = 600
_DUMP_AT = 0.8
"""Part of the time limit after which a worker writes its stack, before it is killed."""
_DUMP_NOT_BEFORE = 0.05
"""Least part of the time limit that a worker has, however long its start took."""
_NAME_BYTES = 512
_FREE_FILES = 16
"""Files that a trainer must be able to open before its workers start: with only a few left it would start a
worker and then wait for a batch that the worker cannot send."""
_EXIT_FEW_FILES = 24
"""Exit code of a worker that could open no more files."""


class WorkerWatch:
    """Tracks the item that each worker reads; a worker that reads for too long writes its stack to stderr.

    A thread of `faulthandler` writes it, which needs neither the interpreter nor a signal: it does so also
    where the worker is inside a call that never returns. In the trainer itself nothing is watched.

    Args:
        limit_s: seconds that the trainer waits for a batch; for the first batch, from now on.
    """

    def __init__(self, *, num_workers: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._began_at: float | None = time.monotonic()
        self._is_counting = False
        names = multiprocessing.get_context("spawn").RawArray("c", (num_workers or 1) * _NAME_BYTES)
        self._names = names  # shared by all processes that the watch is sent to

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Scope of one batch; its time begins with its first read, so entries in memory are not timed."""
        try:
            yield
        finally:
            if self._is_counting:
                faulthandler.cancel_dump_traceback_later()
                self._is_counting = False
                self._note("")

    def reads(self, name: str) -> None:
        """Note the item that this process begins to read."""
        if get_worker_info() is None:
            return
        if not self._is_counting:
            self._is_counting = True
            # The trainer's time limit for the first batch has been running while this worker started.
            spent_s = 0.0 if self._began_at is None else time.monotonic() - self._began_at
            self._began_at = None
            dump_after_s = max(_DUMP_NOT_BEFORE * self._limit_s, _DUMP_AT * self._limit_s - spent_s)
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback_later(dump_after_s, file=sys.__stderr__)
        self._note(name)

    def being_read(self) -> list[str]:
        """The items that workers are reading."""
        raw = self._names.raw
        names = (raw[start : start + _NAME_BYTES] for start in range(0, len(raw), _NAME_BYTES))
        return [text for name in names if (text := name.rstrip(b"\0").decode(errors="replace"))]

    def _note(self, name: str) -> None:
        worker = get_worker_info()
        assert worker is not None
        start = worker.id * _NAME_BYTES
        encoded = name.encode(errors="replace")[:_NAME_BYTES]
        self._names[start : start + _NAME_BYTES] = encoded.ljust(_NAME_BYTES, b"\0")


class WorkerContext(SpawnContext):
    """Starts workers that exit when they cannot send a batch; Python would drop the batch and continue.

    They are spawned: a fork can deadlock on a lock that a thread of this process holds, and inherits its
    CUDA.
    """

    def Queue(self, maxsize: int = 0) -> "Queue[Any]":
        """A queue of such a worker."""
        return _StrictQueue(maxsize, ctx=self.get_context())


class _StrictQueue(Queue):  # type: ignore[type-arg]  # it takes no argument when this runs
    @staticmethod
    def _on_queue_feeder_error(error: Exception, item: object) -> None:
        """Called in the thread that sends a batch, each tensor of which is an open file."""
        if lacks_files(error) and get_worker_info() is not None:
            os._exit(_EXIT_FEW_FILES)
        Queue._on_queue_feeder_error(error, item)  # type: ignore[attr-defined]  # not in typeshed
        if get_worker_info() is not None:
            os._exit(1)


def ignore_stop_signals(worker_id: int) -> None:
    """Let a worker outlive the signals that stop a run, which reach all processes: its step is finished.

    SIGTERM is also how a stuck worker is ended at exit, so it starts a countdown that ends the worker.
    """
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows has only the first
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_AFTER_SIGTERM))


def watched_batches(loader: Iterable[_Batch], watch: WorkerWatch) -> Iterator[_Batch]:
    """The batches of a loader; when torch gives up on its workers, the remaining ones are killed.

    A worker that hangs in a read ignores SIGTERM, and the trainer would wait for it at its own exit.

    Raises:
        OSError: this process, or a worker, could open no more files.
    """
    others = multiprocessing.active_children()
    batches = iter(loader)
    workers = [child for child in multiprocessing.active_children() if child not in others]
    given_up = None
    while given_up is None:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            has_few_files = lacks_files(error)
            if not is_lost_worker(error) and not has_few_files:
                raise
            reading = ", ".join(watch.being_read())
            given_up = f"{str(error).splitlines()[0]}{reading and f'; being read: {reading}'}"
        else:
            yield batch
    # When the error is dropped, torch forgets its workers; before that it raises for each one that dies.
    del batches
    for worker in workers:
        worker.kill()
    if has_few_files or _EXIT_FEW_FILES in [worker.exitcode for worker in workers]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    raise RuntimeError(given_up)


def require_free_files() -> None:
    """Check that workers can be started: with too few files they, or this process, would stop half-way."""
    with ExitStack() as opened:
        for _ in range(_FREE_FILES):
            opened.enter_context(Path(os.devnull).open("rb"))


def is_lost_worker(error: RuntimeError) -> bool:
    """Whether torch reports that a worker died or hangs, for which it has no class."""
    return str(error).startswith("DataLoader ")
