"""This file starts commands that outlive the server, captions and grids of steps, and finds them again.

Next to the log of a process is a json file with how it was started and which process it is. How far it is
with captions is in the folder of the data set, whoever started it; these files only add that a process
has not come to it yet, or ended before.
"""

import hashlib
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import TypeAdapter

from diffsynth_lite.captioning.report import CaptioningStatus, CaptionReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import read_bytes, write_json
from diffsynth_lite.queue.folder import Queue, now
from diffsynth_lite.queue.outcome import log_lines, written_at
from diffsynth_lite.queue.worker import start_detached
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace

Command = Literal["caption", "sample"]
JobState = Literal["starting", "running", "ended", "did not start"]

_WORDS: Mapping[Command, tuple[str, str]] = {
    "caption": ("captions", "written"),
    "sample": ("steps", "compared"),
}
"""What each command makes, and what is done to it."""
_MOST_BYTES = 1 << 20
_LAST_SECONDS = 5.0
_LONGEST_NAME = 200
"""Of a file without its ending, in bytes; file systems allow 255 with it."""
_PAUSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process that the screen started.

    Attributes:
        name: of its files.
        folder: of the data set, or of the run.
        arguments: of the command, to which the workspace is the working folder.
        process: that was started, as :class:`Process` writes it.
        started_at: seconds since 1970.
        log_start: bytes of the log that processes before it wrote.
        was_signalled: whether it was asked to stop.
        command: "caption", or "sample" for a grid of steps.
    """

    name: str
    folder: str
    arguments: tuple[str, ...]
    process: str
    started_at: float
    log_start: int
    was_signalled: bool = False
    command: Command = "caption"

    @property
    def is_alive(self) -> bool:
        """Whether it runs; one of another machine, as of a container before this one, does not run here."""
        return lives_here(self.process)

    @property
    def state(self) -> JobState:
        """How far it has come with captions."""
        has_come = written_at(CaptionReport(Path(self.folder)).status_file) >= self.started_at
        if self.is_alive:
            return "running" if has_come else "starting"
        return "ended" if has_come else "did not start"

    @property
    def works(self) -> bool:
        """Whether it has more to do, or is only about to end."""
        is_ending = (
            self.command == "caption" and self.state == "running" and not captions_in(Path(self.folder))
        )
        return self.is_alive and not is_ending


_AS_JSON = TypeAdapter(Job)


class Jobs:
    """The processes that this screen, or one before it, started in a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._queue = Queue(workspace)

    def of(self, folder: Path) -> Job | None:
        """The latest process that was started for a data set, or a run."""
        return self._read(self._file(folder))

    def start(self, arguments: Sequence[str], folder: Path, *, command: Command = "caption") -> None:
        """Start a command in a session of its own.

        Raises:
            UserError: it runs there already, something else has the device, or it cannot be started.
        """
        folder, (things, done) = folder.resolve(), _WORDS[command]
        if (job := self.of(folder)) is not None:
            _await_end(job)
        with self._queue.changing():  # No worker starts a run meanwhile.
            job = self.of(folder)
            if captions_in(folder) is not None or (job is not None and job.is_alive):
                raise UserError(f"{things} of {folder.name} are being {done} already; stop that first")
            if uses_device(arguments) and (holder := self._holder()):
                raise UserError(
                    f"this device is in use: {holder}; stop that first, or wait until it has ended"
                )
            self._start(command, arguments, folder)

    def stop(self, folder: Path, *, command: Command = "caption") -> None:
        """Have the command stop that works in a folder, also where a terminal started it."""
        things, done = _WORDS[command]
        with self._queue.changing():
            job, status = self.of(folder), captions_in(folder)
            if job is None or not job.is_alive:
                if status is None:
                    raise UserError(f"no {things} of {folder.name} are being {done} on this machine")
                interrupt(status.process)
            elif not job.was_signalled:  # The second signal would end it at once.
                interrupt(job.process)
                with suppress(OSError):  # A full disk is when somebody wants to stop.
                    write_json(self._file(folder), asdict(replace(job, was_signalled=True)))

    def log(self, job: Job, *, num_lines: int) -> list[str]:
        """The last lines that a process printed, with secrets masked."""
        log = self._workspace.logs_folder / f"{job.name}.log"
        return log_lines(log, num_lines=num_lines, start=job.log_start)

    def holders(self) -> list[str]:
        """What uses the device of this machine and is no run, such as "captions of mug"."""
        jobs = map(self._read, sorted(self._workspace.logs_folder.glob("*.json")))
        busy = [job for job in jobs if job and uses_device(job.arguments) and job.works]
        names = [f"{_WORDS[job.command][0]} of {Path(job.folder).name}" for job in busy]
        for name, folder in self._workspace.data_sets.items():
            if (status := captions_in(folder)) is not None and uses_device(status.arguments):
                names.append(f"captions of {name}")
        return list(dict.fromkeys(names))

    def _holder(self) -> str:
        """The first that uses the device, runs included; empty for none. Asked within the queue's lock."""
        ours = next((run.name for run in self._queue.in_state("running") if self._queue.is_alive(run)), None)
        theirs = self._queue.run_of_others()
        name = ours or (theirs.path.name if theirs is not None else "")
        return next(iter(self.holders()), f"{name} trains" if name else "")

    def _start(self, command: Command, arguments: Sequence[str], folder: Path) -> None:
        file = self._file(folder)
        with self._queue.open_log(file.with_suffix(".log")) as log:
            job = Job(
                name=file.stem,
                folder=str(folder),
                arguments=tuple(arguments),
                process="",
                started_at=now(),
                log_start=log.seek(0, os.SEEK_END),
                command=command,
            )
            start_command([command, *arguments], self._workspace, log, noted_in=file, facts=asdict(job))

    def _file(self, folder: Path) -> Path:
        """The file of the process for a folder, whose name others may have, too."""
        path = os.fsencode(folder.resolve())
        name = os.fsencode(folder.name)[:_LONGEST_NAME].decode(errors="ignore")
        digest = hashlib.sha256(path).hexdigest()[:8]
        return self._workspace.logs_folder / f"{name}-{digest}.json"

    def _read(self, file: Path) -> Job | None:
        try:
            return replace(_AS_JSON.validate_json(read_bytes(file, most_bytes=_MOST_BYTES)), name=file.stem)
        except (OSError, UserError, ValueError):
            return None


def start_command(
    words: Sequence[str],
    workspace: Workspace,
    log: IO[bytes],
    *,
    noted_in: Path,
    facts: Mapping[str, Any],
    errors: IO[bytes] | None = None,
    variables: Mapping[str, str] | None = None,
    ended_in: Path | None = None,
) -> None:
    """Start a command of this installation in a session of its own, so that it outlives this process.

    Args:
        noted_in: json file that gets ``facts``, and as ``process`` which one it is.
        ended_in: json file that gets its exit code once it has ended, unless this process is gone by then.
    """
    command = [sys.executable, "-m", "diffsynth_lite.cli.main", *words]
    try:
        child = start_detached(command, cwd=workspace.path, log=log, errors=errors, variables=variables)
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {error.strerror}") from None
    process = Process.of(child.pid)

    def wait() -> None:  # or it would stay as a zombie
        code = child.wait()
        if ended_in is not None:
            write_json(ended_in, {"process": process.as_text(), "exit_code": code})

    threading.Thread(target=wait, daemon=True).start()
    try:
        write_json(noted_in, {**facts, "process": process.as_text()})
    except OSError:  # Nobody could find it, nor stop it.
        process.interrupt()
        raise


def lives_here(process: str) -> bool:
    """Whether a process, as :class:`Process` writes it, runs on this machine."""
    found = Process.from_text(process)
    return found is not None and found.is_here() and found.is_alive()


def captions_in(folder: Path) -> CaptioningStatus | None:
    """How far the command is that writes captions in a folder, if one of this machine does so now."""
    status = CaptionReport(folder).status()
    process = Process.from_text(status.process) if status is not None and status.is_running else None
    return status if process is not None and process.is_here() else None


def _await_end(job: Job) -> None:
    """Wait for a process whose work has ended, which takes a moment."""
    end = time.monotonic() + _LAST_SECONDS
    while job.is_alive and not job.works and time.monotonic() < end:
        time.sleep(_PAUSE_S)


def uses_device(arguments: Sequence[str]) -> bool:
    """Whether a command keeps others from the device of this machine: all do but captions of an endpoint."""
    return not any(word.partition("=")[0] == "--endpoint" for word in arguments)


def interrupt(process: str) -> None:
    """Ask a process, as :class:`Process` writes it, to end."""
    if (found := Process.from_text(process)) is not None:
        found.interrupt()
