"""This file starts the runs of the queue, one a device, in sessions of their own, so that they outlive it."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import DISK_FULL
from diffsynth_lite.queue.entry import Entry, QueuedRun
from diffsynth_lite.queue.folder import Queue, now
from diffsynth_lite.queue.locks import take_lock
from diffsynth_lite.queue.outcome import log_lines, shows_full_disk
from diffsynth_lite.run_folder.folder import REQUEST_FILES, RunFolder
from diffsynth_lite.run_folder.process import Process

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_START_S = 60.0
"""Time in which a worker comes to its lock, also on a slow disk."""
_DETACHED: dict[str, Any] = {"start_new_session": True}
if sys.platform == "win32":
    _DETACHED = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}


def start_worker(queue: Queue) -> None:
    """Have the queue go on: it is not paused any more, and a worker of its own session starts what waits."""
    queue.unpause()
    if queue.is_worked():
        return
    log = queue.path / "logs" / "worker.log"
    command = [sys.executable, "-m", "diffsynth_lite.cli.main", "queue", "work"]
    with queue.open_log(log) as printed:
        worker = start_detached(
            [*command, "--workspace", str(queue.workspace.path)], cwd=queue.workspace.path, log=printed
        )
    threading.Thread(target=worker.wait, daemon=True).start()  # or it would stay as a zombie
    end = time.monotonic() + _START_S
    while worker.returncode is None and not queue.is_worked() and time.monotonic() < end:
        time.sleep(_POLL_S / 10)
    if worker.returncode and not queue.is_worked():
        raise UserError(f"the worker ended at once: {' '.join(log_lines(log, num_lines=1))}; see {log}")


def start_detached(
    command: Sequence[str],
    *,
    cwd: Path,
    log: IO[bytes],
    errors: IO[bytes] | None = None,
    variables: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a program in a session of its own, without input; its output is a log.

    Args:
        errors: takes what it logs; None is the log with its output.
        variables: of its environment, in addition to those of this process.

    Raises:
        OSError: the folder is gone, or the system refuses.
    """
    # The folder may be somebody else's: no modules are taken from there.
    own = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **(variables or {})}
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=errors or subprocess.STDOUT,
        env={**os.environ, **own},
        **_DETACHED,
    )


class Worker:
    """Starts what waits until nothing does, or until it is paused and nothing runs; there is one a queue.

    Args:
        command: makes the command of an entry.
        holders: names what else uses the device of this machine.
        look: called at each look at the queue.
        at_once: runs that are started at the same time on a cluster, whatever uses the devices of this
            machine; None starts one a device, here.
        poll_s: between two looks at the queue.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        command: Callable[[Entry], list[str]] = Entry.command,
        holders: Callable[[], Sequence[str]] = tuple,
        look: Callable[[], None] = lambda: None,
        at_once: int | None = None,
        poll_s: float = _POLL_S,
    ) -> None:
        self._queue = queue
        self._command = command
        self._holders = holders
        self._look = look
        self._at_once = at_once
        self._poll_s = poll_s
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._theirs: RunFolder | None = None
        self._waits_for = ""

    def work(self) -> None:
        """Work until there is nothing to do."""
        with self._queue.work_lock() as lock:
            while not self._has_ended(lock):
                self._look()
                time.sleep(self._poll_s)

    def _has_ended(self, lock: ExitStack) -> bool:
        with self._queue.changing():
            for run in self._queue.in_state("running"):
                self._look_at(run)
            if self._start_next() or self._queue.in_state("running"):
                return False
            # Who adds an entry now finds no worker, and not one that will never look again.
            lock.close()
            return True

    def _look_at(self, run: QueuedRun) -> None:
        child = self._children.get(run.id)
        # Its output may be held longer, by a process that it left.
        if (child is not None and child.poll() is None) or (child is None and self._queue.is_alive(run)):
            return
        self._children.pop(run.id, None)
        exit_code = child.returncode if child is not None else None
        self._finish(run, self._queue.result(run, exit_code))

    def _start_next(self) -> bool:
        """Start the first run for each device that is free; whether any is left to be started later."""
        busy = [entry for run in self._queue.in_state("running") if (entry := run.entry)]
        is_left = False
        for run, entry in [(run, entry) for run in self._queue.in_state("waiting") if (entry := run.entry)]:
            if self._queue.paused() is not None:
                return False
            if self._has_no_room(entry, busy):
                is_left = True
            else:
                self._start(run, entry)
            busy.append(entry)  # Who waits for a device is not overtaken there.
        return is_left

    def _has_no_room(self, entry: Entry, busy: Sequence[Entry]) -> bool:
        if self._at_once is not None:
            return len(busy) >= self._at_once
        return any(entry.shares_device(other) for other in busy) or self._is_taken()

    def _is_taken(self) -> bool:
        """Whether somebody else has a device, nobody knows which: a run of a terminal, or ``holders``."""
        if self._theirs is None or not self._theirs.trains_here():
            self._theirs = self._queue.run_of_others()
        theirs = self._theirs.path.name if self._theirs is not None else ""
        name = next(iter(self._holders()), theirs)
        if name and name != self._waits_for:
            logger.info("Waits for %s, which uses the device of this machine.", name)
        self._waits_for = name
        return bool(name)

    def _start(self, run: QueuedRun, entry: Entry) -> None:
        queue = self._queue
        try:
            entry.load(queue.workspace)
        except (UserError, OSError) as error:
            refused = entry.model_copy(
                update={"ended_at": now(), "exit_code": 2, "outcome": "refused", "message": str(error)}
            )
            self._finish(run, refused)
            return
        try:
            entry = entry.model_copy(update={"started_at": now()})
            run = queue.put(run, "running", entry)
            self._spawn(run, entry)
        except OSError as error:
            if error.errno in DISK_FULL:
                queue.put(run, "waiting")
                self._pause(run)
            else:
                self._finish(run, queue.result(run, None))
        else:
            logger.info("%s: started.", run.name)

    def _spawn(self, run: QueuedRun, entry: Entry) -> None:
        folder = entry.folder_in(self._queue.workspace)
        for name in REQUEST_FILES.values():  # those that a run before it did not see
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)
        with self._queue.open_log(self._queue.log_file(run)) as log:
            # The run inherits the lock with its output, so that it lasts as long as the run does.
            take_lock(log)
            child = start_detached(
                self._command(entry),
                cwd=entry.place(self._queue.workspace),
                log=log,
                variables={"CUDA_VISIBLE_DEVICES": entry.device} if entry.device else {},
            )
        self._children[run.id] = child
        process = Process.of(child.pid).as_text()
        with suppress(OSError):  # On a disk that is full now, only a signal has no address.
            self._queue.put(run, "running", entry.model_copy(update={"process": process}))

    def _finish(self, run: QueuedRun, result: Entry | None) -> None:
        """Put a run to those that are done; a disk that is full pauses the queue."""
        is_full = not self._queue.finish(run, result)
        if result is None:
            return
        code = "" if result.exit_code is None else f" (exit code {result.exit_code})"
        logger.info(
            "%s: %s%s%s", run.name, result.outcome, code, f": {result.message}" if result.message else ""
        )
        if is_full or shows_full_disk(result, self._queue.workspace):
            self._pause(run)

    def _pause(self, run: QueuedRun) -> None:
        reason = f"the disk is full, as {run.name} found; make room, then add it again"
        logger.warning("Paused: %s", reason)
        self._queue.write_pause(reason)
