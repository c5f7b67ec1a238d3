"""This file puts runs into the queue, asks those that run for something, and knows how far each of them is.

Whether a run goes on is known from its own folder, whoever started it; the queue adds what the folder cannot
know: that a run waits, has not come to its folder yet, or ended before it did.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.adding import require_startable
from diffsynth_lite.queue.entry import Entry, QueuedRun
from diffsynth_lite.queue.folder import Queue
from diffsynth_lite.queue.outcome import log_lines, written_at
from diffsynth_lite.queue.worker import start_worker
from diffsynth_lite.run_folder.folder import REQUEST_FILES, RunFolder, resolver
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace

NEVER_STARTED = ("refused", "did not start")
"""Outcomes of runs whose process ended before it came to training."""


class QueuedRuns:
    """The runs of a workspace as its queue has them at a moment.

    Attributes:
        waiting: runs that will be started, in their order.
        needs_go: whether no worker will start them, as after a restart of the machine.
        resolve: ``Path.resolve`` of run folders.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.queue = Queue(workspace)
        self.snapshot = self.queue.snapshot()
        self.waiting = [run for run in self.snapshot.in_state("waiting") if run.entry]
        self.needs_go = self.snapshot.paused is not None or not self.snapshot.is_worked
        runs = [run for state in ("done", "waiting", "running") for run in self.snapshot.in_state(state)]
        self.resolve = resolver()
        self._runs = {run.entry.folder_in(workspace, self.resolve): run for run in runs if run.entry}

    def of(self, folder: Path) -> QueuedRun | None:
        """The entry of the run in a folder: that which waits or runs, or else the latest."""
        return self._runs.get(self.resolve(folder))

    def word(self, folder: Path, state: str) -> str:
        """A run's state in a word: that of its entry where that has not come to its folder."""
        run = self.of(folder)
        if run is None or run.entry is None:
            return state
        if run.state == "waiting":
            return "running" if state == "running" else "waiting"
        if run.state == "running":
            return "starting" if written_at(RunFolder(folder).status_file) < run.entry.started_at else state
        has_ended_before = run.entry.outcome in NEVER_STARTED and state == "not started"
        return "did not start" if has_ended_before else state

    def failed_start(self, folder: Path) -> Entry | None:
        """What was started last for a run, if that ended before it came to training."""
        run = self.of(folder)
        entry = run.entry if run is not None and run.state == "done" else None
        is_latest = entry is not None and written_at(RunFolder(folder).status_file) <= entry.ended_at
        return entry if entry is not None and is_latest and entry.outcome in NEVER_STARTED else None

    def place(self, folder: Path) -> int:
        """Number of a run among those that wait, from 1; 0 for one that does not."""
        run = self.of(folder)
        return self.waiting.index(run) + 1 if run in self.waiting else 0

    def without_run(self) -> dict[str, Path]:
        """The folders of runs whose process has not come to them, by names of their own."""
        return {
            run.name: folder
            for folder, run in self._runs.items()
            if run.entry and (run.state != "done" or run.entry.outcome in NEVER_STARTED)
            if not RunFolder(folder).holds_run()
        }

    def log(self, folder: Path, *, num_lines: int) -> list[str]:
        """The last lines that the latest process of a run printed, with secrets masked."""
        run = self.of(folder)
        return [] if run is None else log_lines(self.queue.log_file(run), num_lines=num_lines)

    def add(self, entries: Sequence[Entry]) -> None:
        """Put runs behind those that wait, and have them started.

        Where others wait that nobody starts, a person decides whether all of them go on.
        """
        for entry in entries:
            folder = entry.folder_in(self.queue.workspace)
            if is_running(folder):
                raise UserError(f"{folder.name} runs already")
        self.queue.add(entries)
        if not self.waiting or not self.needs_go:
            start_worker(self.queue)

    def start_again(self, run: QueuedRun) -> None:
        """Start once more what did not start, in place of that."""
        if run.entry is None:
            raise UserError(run.refusal)
        entry = run.entry.asked()
        require_startable(entry, self.queue.workspace)
        self.add([entry])
        if run.state == "done":
            self.queue.remove(run.id)

    def ask(self, folder: Path, what: str) -> None:
        """Ask a run to stop, to save, or to generate previews; asking twice is asking once."""
        run = self.of(folder)
        if is_running(folder):
            _put(folder / REQUEST_FILES[what])
        elif run is None or run.state != "running":
            raise UserError(f"{folder.name} does not run")
        elif what != "stop":
            raise UserError(f"{folder.name} is still starting")
        else:
            self._interrupt(run)

    def _interrupt(self, run: QueuedRun) -> None:
        with self.queue.changing():
            latest = next((each for each in self.queue.in_state("running") if each.id == run.id), None)
            process = Process.from_text(latest.entry.process) if latest and latest.entry else None
            # A second signal would end it at once.
            if latest and latest.entry and process and not latest.entry.was_signalled:
                process.interrupt()
                with suppress(OSError):  # A full disk is when somebody wants to stop.
                    self.queue.put(latest, "running", latest.entry.model_copy(update={"was_signalled": True}))


def is_running(folder: Path) -> bool:
    """Whether a run goes on, whoever started it: its process lives, as far as that can be known."""
    run = RunFolder(folder)
    status = run.read_status()
    return status is not None and status.get("state") == "running" and not run.is_abandoned()


def _put(request: Path) -> None:
    """Make the file that asks a run for something, unless it is there."""
    try:
        os.close(os.open(request, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"{request}: cannot be made: {error.strerror}") from None
