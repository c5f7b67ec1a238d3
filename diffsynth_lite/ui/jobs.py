"""This file starts commands in processes that outlive the server, and finds them again when it is restarted.

Next to the log of a process is a json file with how it was started and which process it is. Whether a run
goes on, or captions are written, is known from its own folder, whoever started it; these files only add what
the folder cannot know: that a process has not come to it yet, or ended before.
"""

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from diffsynth_lite.captioning.report import CaptioningStatus, CaptionReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, read_bytes, write_json
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace

Command = Literal["train", "caption"]
JobState = Literal["starting", "running", "ended", "did not start"]

REQUESTS = {"stop": "STOP", "save": "SAVE", "sample": "SAMPLE"}
"""What a run can be asked for, and the file in its folder that asks for it."""
_TAIL_BYTES = 64 * 1024
_MOST_BYTES = 1 << 20
_LAST_SECONDS = 5.0
_EXIT_REFUSED = 2
_LONGEST_NAME = 200
"""Of a file without its ending, in bytes; file systems allow 255 with it."""
_PAUSE_S = 0.05
_PROGRAM = ("-m", "diffsynth_lite.cli.main")
_LAUNCHED_TRAIN = ("-m", "diffsynth_lite.cli.train")
_LAUNCHED = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process that the screen started.

    Attributes:
        name: of its files.
        folder: of the run, or of the data set that gets captions.
        arguments: of the command.
        process: that was started, as :class:`Process` writes it.
        started_at: seconds since 1970.
        log_start: bytes of the log that processes before it wrote.
        was_signalled: whether it was asked to stop by a signal.
        has_come: whether it was seen to have written its status; its folder may be gone by now.
        exit_code: None while it runs, and where no server was there when it ended.
    """

    name: str
    folder: str
    arguments: tuple[str, ...]
    working_folder: str
    num_processes: int
    process: str
    started_at: float
    log_start: int
    was_signalled: bool = False
    has_come: bool = False
    exit_code: int | None = None
    command: Command = "train"

    @property
    def status_file(self) -> Path:
        """The file in which the command writes how far it is."""
        run = RunFolder(Path(self.folder))
        return run.status_file if self.command == "train" else CaptionReport(run.path).status_file


class Jobs:
    """The processes that this screen, or one before it, started in a workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._lock = threading.RLock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def all(self) -> dict[str, Job]:
        """Each process by its name, as far as its file can be read."""
        files = sorted(self._workspace.logs_folder.glob("*.json"))
        return {job.name: job for file in files if (job := self._read(file)) is not None}

    def of(self, folder: Path, command: Command = "train") -> Job | None:
        """The latest process that was started for the run in a folder, or for its captions."""
        return self._read(self._file(self._name_for(folder.resolve(), command)))

    def word(self, folder: Path, state: str) -> str:
        """A run's state in a word: that of its process where that has not come to it.

        Args:
            state: by its folder.
        """
        job = self.of(folder)
        found = "ended" if job is None else self.state(job)
        is_known = found == "starting" or (found == "did not start" and state == "not started")
        return found if is_known else state

    def without_run(self) -> dict[str, Path]:
        """The folders of runs that a process was started for and has not come to, by the names of these."""
        runs = {name: job for name, job in self.all().items() if job.command == "train"}
        folders = {name: Path(job.folder) for name, job in runs.items() if not job.has_come}
        return {name: folder for name, folder in folders.items() if not RunFolder(folder).holds_run()}

    def state(self, job: Job) -> JobState:
        """How far a process has come."""
        has_come = job.has_come or _written_at(job.status_file) >= job.started_at
        if has_come and not job.has_come:
            self._note(job, has_come=True)
        if self._is_alive(job):
            return "running" if has_come else "starting"
        latest = self._read(self._file(job.name)) or job
        # A continuation that was refused has left the status of before, written again.
        status = RunFolder(Path(job.folder)).read_status() or {}
        is_run_refused = latest.exit_code == _EXIT_REFUSED and status.get("state") != "failed"
        is_refused = job.command == "train" and is_run_refused
        return "ended" if has_come and not is_refused else "did not start"

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        command: Command = "train",
        working_folder: Path | None = None,
        num_processes: int = 1,
    ) -> Job:
        """Start a command of this installation in a session of its own, so that it outlives this process.

        Args:
            arguments: of the command.
            folder: of the run, or of the data set that gets captions.
            working_folder: to which the paths in these are relative; None is the workspace.
            num_processes: that train together.

        Raises:
            UserError: something else has the device, or writes captions there; or this one would not be seen
                here, or cannot be started.
        """
        folder = (self._workspace.path / folder).resolve()
        known = [place.resolve() for place in self._workspace.runs.values()]
        is_seen = folder.parent == self._workspace.runs_folder.resolve() or folder in known
        if command == "train" and not is_seen:
            raise UserError(
                f"output.dir: {folder}: is not seen here; give one in runs/, such as runs/{folder.name}"
            )
        with self._lock:
            if command == "caption" and self._captions(folder):
                raise UserError(f"captions of {folder.name} are being written already; stop that first")
            if _uses_device(arguments):
                self._require_device()
            for name in REQUESTS.values() if command == "train" else ():
                _drop(folder / name)
            job = Job(
                name=self._name_for(folder, command),
                command=command,
                folder=str(folder),
                arguments=tuple(arguments),
                working_folder=str(working_folder or self._workspace.path),
                num_processes=num_processes,
                process="",
                started_at=time.time(),
                log_start=0,
            )
            with self._file(job.name, "log").open("ab") as log:
                job = replace(job, log_start=log.seek(0, os.SEEK_END))
                child = _spawn(job, log.fileno())
            self._children[job.name] = child
            job = replace(job, process=Process.of(child.pid).as_text())
            write_json(self._file(job.name), asdict(job))
        return job

    def ask(self, folder: Path, what: str) -> None:
        """Ask a run to stop, to save, or to generate previews; asking twice is asking once.

        Args:
            what: a key of ``REQUESTS``.

        Raises:
            UserError: there is nobody to ask.
        """
        with self._lock:
            job = self.of(folder)
            if is_running(folder):
                _put(folder / REQUESTS[what])
            elif job is None or self.state(job) != "starting":
                raise UserError(f"{folder.name} does not run")
            elif what != "stop":
                raise UserError(f"{folder.name} is still starting")
            else:
                self._interrupt(job)

    def stop_captions(self, folder: Path) -> None:
        """Have the command stop that writes captions in a folder, also where a terminal started it.

        Raises:
            UserError: there is nobody to ask.
        """
        with self._lock:
            job, status = self.of(folder, "caption"), captions_in(folder)
            if job is not None and self._is_alive(job):
                self._interrupt(job)
            elif status is not None:
                _interrupt(Process.from_text(status.process))
            else:
                raise UserError(f"no captions of {folder.name} are being written on this machine")

    def _interrupt(self, job: Job) -> None:
        if not job.was_signalled:  # The second one would end it at once.
            self._note(job, was_signalled=True)
            _interrupt(Process.from_text(job.process))

    def log(self, job: Job, *, num_lines: int) -> list[str]:
        """The last lines that a process printed, with secrets masked."""
        with suppress(OSError), self._file(job.name, "log").open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(job.log_start, end - _TAIL_BYTES))
            text = log.read(_TAIL_BYTES).decode(errors="replace")
            lines = [line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").splitlines()]
            return [redacted(line) for line in lines if line.strip()][-num_lines:]
        return []

    def _require_device(self) -> None:
        """Raise a ``UserError`` where something has the device of this machine, also one of a terminal."""
        for name, job in self.all().items():
            if _uses_device(job.arguments) and self._works(job):
                raise _busy(name if job.command == "train" else Path(job.folder).name, job.command)
        for name, folder in self._workspace.runs.items():
            if RunFolder(folder).trains_here():
                raise _busy(name, "train")
        for name, folder in self._workspace.data_sets.items():
            if (status := captions_in(folder)) is not None and _uses_device(status.arguments):
                raise _busy(name, "caption")

    def _captions(self, folder: Path) -> bool:
        job = self.of(folder, "caption")
        return captions_in(folder) is not None or (job is not None and self._works(job))

    def _works(self, job: Job) -> bool:
        """Whether a process works. Where its work has ended, its end is waited for, which takes a moment."""
        end = time.monotonic() + _LAST_SECONDS
        folder, is_run = Path(job.folder), job.command == "train"
        while self._is_alive(job):
            is_at_work = is_running(folder) if is_run else captions_in(folder) is not None
            if self.state(job) == "starting" or is_at_work or time.monotonic() > end:
                return True
            time.sleep(_PAUSE_S)
        return False

    def _name_for(self, folder: Path, command: Command = "train") -> str:
        """The name of the files of processes for a folder: its own, with a number if another has it."""
        first = folder.name
        if len(os.fsencode(first)) >= _LONGEST_NAME:
            first = hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]
        first += "" if command == "train" else ".captions"
        names = (f"{first}~{number}" if number > 1 else first for number in itertools.count(1))
        return next(
            name
            for name in names
            if not (file := self._file(name)).exists()
            or ((job := self._read(file)) is not None and (job.folder, job.command) == (str(folder), command))
        )

    def _is_alive(self, job: Job) -> bool:
        process = Process.from_text(job.process)
        # One of another machine, as of a container before this one, cannot train here.
        if job.exit_code is None and process is not None and process.is_here() and process.is_alive():
            return True
        with self._lock:
            if (child := self._children.pop(job.name, None)) is not None:
                self._note(job, exit_code=child.wait())
        return False

    def _file(self, name: str, kind: str = "json") -> Path:
        return self._workspace.logs_folder / f"{name}.{kind}"

    def _note(self, job: Job, **values: Any) -> None:
        """Change the file of a process, unless another one was started meanwhile."""
        with self._lock:
            latest = self._read(self._file(job.name))
            if latest is not None and latest.process == job.process:
                write_json(self._file(job.name), asdict(replace(latest, **values)))

    def _read(self, file: Path) -> Job | None:
        try:
            given: dict[str, Any] = parse_json(read_bytes(file, most_bytes=_MOST_BYTES))
            return Job(**{**given, "name": file.stem, "arguments": tuple(given["arguments"])})
        except (OSError, UserError, ValueError, TypeError, LookupError):
            return None


def is_running(folder: Path) -> bool:
    """Whether a run goes on, whoever started it: its process lives, as far as that can be known."""
    run = RunFolder(folder)
    status = run.read_status()
    return status is not None and status.get("state") == "running" and not run.is_abandoned()


def captions_in(folder: Path) -> CaptioningStatus | None:
    """How far the command is that writes captions in a folder, if one of this machine does so now."""
    status = CaptionReport(folder).status()
    process = Process.from_text(status.process) if status is not None and status.is_running else None
    return status if process is not None and process.is_here() else None


def _uses_device(arguments: Sequence[str]) -> bool:
    """Whether a command keeps others from the device of this machine: all do but captions of an endpoint."""
    return not any(word.partition("=")[0] == "--endpoint" for word in arguments)


def _busy(name: str, command: Command) -> UserError:
    what = f"{name} trains" if command == "train" else f"a model writes captions of {name}"
    return UserError(f"{what} on this device; stop it first, or wait until it has ended")


def _spawn(job: Job, log: int) -> "subprocess.Popen[bytes]":
    """Start the process of a job.

    Raises:
        UserError: its folder is gone, or the system refuses.
    """
    is_launched = job.num_processes > 1
    launched = (*_LAUNCHED, str(job.num_processes), *_LAUNCHED_TRAIN)
    program = launched if is_launched else (*_PROGRAM, job.command)
    detached: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        detached = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    try:
        return subprocess.Popen(
            [sys.executable, *program, *job.arguments],
            cwd=job.working_folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # The folder may be somebody else's: no modules are taken from there.
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
            **detached,
        )
    except OSError as error:
        raise UserError(
            f"{job.command} cannot be started in {job.working_folder}: {error.strerror}"
        ) from None


def _put(request: Path) -> None:
    """Make the file that asks a run for something, unless it is there.

    Raises:
        UserError: its folder may not be written to.
    """
    try:
        os.close(os.open(request, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        pass
    except OSError as error:
        raise UserError(f"{request}: cannot be made: {error.strerror}") from None


def _drop(request: Path) -> None:
    """Remove what a run that ended did not see.

    Raises:
        UserError: it is a folder, or may not be removed.
    """
    try:
        request.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{request}: cannot be removed: {error.strerror}") from None


def _interrupt(process: Process | None) -> None:
    if process is None or not process.is_alive():
        return
    with suppress(ProcessLookupError):
        if sys.platform == "win32":  # There no process without a console gets SIGINT.
            os.kill(process.pid, signal.CTRL_BREAK_EVENT)
        else:
            os.kill(process.pid, signal.SIGINT)


def _written_at(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0
