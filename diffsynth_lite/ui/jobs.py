"""This file starts the command that writes captions so that it outlives the server, and finds it again.

Next to the log of a process is a json file with how it was started and which process it is. How far it is
with the captions is in the folder of the data set, whoever started it; these files only add that a process
has not come to it yet, or ended before.
"""

import hashlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from diffsynth_lite.captioning.report import CaptioningStatus, CaptionReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, read_bytes, write_json
from diffsynth_lite.queue.folder import Queue, now
from diffsynth_lite.queue.outcome import log_lines, written_at
from diffsynth_lite.queue.worker import start_detached
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace

JobState = Literal["starting", "running", "ended", "did not start"]

_MOST_BYTES = 1 << 20
_LAST_SECONDS = 5.0
_LONGEST_NAME = 200
"""Of a file without its ending, in bytes; file systems allow 255 with it."""
_PAUSE_S = 0.05
_PROGRAM = ("-m", "diffsynth_lite.cli.main", "caption")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process that writes captions and that the screen started.

    Attributes:
        name: of its files.
        folder: of the data set.
        arguments: of the command, to which the workspace is the working folder.
        process: that was started, as :class:`Process` writes it.
        started_at: seconds since 1970.
        log_start: bytes of the log that processes before it wrote.
        was_signalled: whether it was asked to stop.
    """

    name: str
    folder: str
    arguments: tuple[str, ...]
    process: str
    started_at: float
    log_start: int
    was_signalled: bool = False

    @property
    def is_alive(self) -> bool:
        """Whether it runs; one of another machine, as of a container before this one, does not run here."""
        process = Process.from_text(self.process)
        return process is not None and process.is_here() and process.is_alive()

    @property
    def state(self) -> JobState:
        """How far it has come."""
        has_come = written_at(CaptionReport(Path(self.folder)).status_file) >= self.started_at
        if self.is_alive:
            return "running" if has_come else "starting"
        return "ended" if has_come else "did not start"

    @property
    def works(self) -> bool:
        """Whether it has more to do, or is only about to end."""
        return self.is_alive and (self.state == "starting" or captions_in(Path(self.folder)) is not None)


class Jobs:
    """The processes that this screen, or one before it, started in a workspace to write captions."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._queue = Queue(workspace)
        self._lock = threading.Lock()

    def of(self, folder: Path) -> Job | None:
        """The latest process that was started for a data set."""
        return self._read(self._file(folder))

    def start(self, arguments: Sequence[str], folder: Path) -> None:
        """Start the command in a session of its own.

        Args:
            folder: of the data set.

        Raises:
            UserError: captions are written there, something else has the device, or it cannot be started.
        """
        folder = folder.resolve()
        with self._lock:
            job = self.of(folder)
            if captions_in(folder) is not None or (job is not None and _await_end(job)):
                raise UserError(f"captions of {folder.name} are being written already; stop that first")
            with self._queue.changing():  # No worker starts a run meanwhile.
                if _uses_device(arguments) and (holder := self.captioning() or self._training()):
                    raise UserError(f"{holder} on this device; stop it first, or wait until it has ended")
                self._start(arguments, folder)

    def stop(self, folder: Path) -> None:
        """Have the command stop that writes captions in a folder, also where a terminal started it.

        Raises:
            UserError: there is nobody to ask.
        """
        with self._lock:
            job, status = self.of(folder), captions_in(folder)
            if job is not None and job.is_alive:
                if not job.was_signalled:  # The second one would end it at once.
                    write_json(self._file(folder), asdict(replace(job, was_signalled=True)))
                    _interrupt(job.process)
            elif status is not None:
                _interrupt(status.process)
            else:
                raise UserError(f"no captions of {folder.name} are being written on this machine")

    def log(self, job: Job, *, num_lines: int) -> list[str]:
        """The last lines that a process printed, with secrets masked."""
        log = self._workspace.logs_folder / f"{job.name}.log"
        return log_lines(log, num_lines=num_lines, start=job.log_start)

    def captioning(self) -> str:
        """What is said of a model that writes captions on this machine; empty where none does."""
        jobs = map(self._read, sorted(self._workspace.logs_folder.glob("*.json")))
        busy = [Path(job.folder).name for job in jobs if job and _uses_device(job.arguments) and job.works]
        for name, folder in self._workspace.data_sets.items():
            if (status := captions_in(folder)) is not None and _uses_device(status.arguments):
                busy.append(name)
        return f"a model writes captions of {busy[0]}" if busy else ""

    def _training(self) -> str:
        """The same of a run; asked while nobody changes the queue."""
        ours = next((run.name for run in self._queue.in_state("running") if self._queue.is_alive(run)), None)
        theirs = self._queue.run_of_others()
        name = ours or (theirs.path.name if theirs is not None else "")
        return f"{name} trains" if name else ""

    def _start(self, arguments: Sequence[str], folder: Path) -> None:
        file = self._file(folder)
        try:
            with self._queue.open_log(file.with_suffix(".log")) as log:
                job = Job(
                    name=file.stem,
                    folder=str(folder),
                    arguments=tuple(arguments),
                    process="",
                    started_at=now(),
                    log_start=log.seek(0, os.SEEK_END),
                )
                child = start_detached(
                    [sys.executable, *_PROGRAM, *arguments], cwd=self._workspace.path, log=log
                )
        except OSError as error:
            raise UserError(f"the command cannot be started: {error.strerror}") from None
        threading.Thread(target=child.wait, daemon=True).start()  # or it would stay as a zombie
        write_json(file, asdict(replace(job, process=Process.of(child.pid).as_text())))

    def _file(self, folder: Path) -> Path:
        """The file of the process for a data set, whose name others may have, too."""
        path = os.fsencode(folder.resolve())
        name = os.fsencode(folder.name)[:_LONGEST_NAME].decode(errors="ignore")
        digest = hashlib.sha256(path).hexdigest()[:8]
        return self._workspace.logs_folder / f"{name}-{digest}.json"

    def _read(self, file: Path) -> Job | None:
        try:
            given: dict[str, Any] = parse_json(read_bytes(file, most_bytes=_MOST_BYTES))
            return Job(**{**given, "name": file.stem, "arguments": tuple(given["arguments"])})
        except (OSError, UserError, ValueError, TypeError, LookupError):
            return None


def captions_in(folder: Path) -> CaptioningStatus | None:
    """How far the command is that writes captions in a folder, if one of this machine does so now."""
    status = CaptionReport(folder).status()
    process = Process.from_text(status.process) if status is not None and status.is_running else None
    return status if process is not None and process.is_here() else None


def _await_end(job: Job) -> bool:
    """Whether a process works. Where its work has ended, its end is waited for, which takes a moment."""
    end = time.monotonic() + _LAST_SECONDS
    while job.is_alive:
        if job.works or time.monotonic() > end:
            return True
        time.sleep(_PAUSE_S)
    return False


def _uses_device(arguments: Sequence[str]) -> bool:
    """Whether a command keeps others from the device of this machine: all do but captions of an endpoint."""
    return not any(word.partition("=")[0] == "--endpoint" for word in arguments)


def _interrupt(process: str) -> None:
    if (found := Process.from_text(process)) is not None:
        found.interrupt()
