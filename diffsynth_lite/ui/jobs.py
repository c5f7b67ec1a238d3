"""This file starts commands that outlive the server, such as captions or a conversion, and finds them again.

How far a command is with captions is in the folder of the data set, whoever started it; what is kept here
only adds that a process has not come to it yet, or ended before.
"""

import hashlib
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from diffsynth_lite.captioning.report import CaptioningStatus, CaptionReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, read_bytes, write_json
from diffsynth_lite.queue.folder import Queue, now
from diffsynth_lite.queue.locks import locked
from diffsynth_lite.queue.outcome import log_lines, written_at
from diffsynth_lite.queue.worker import start_detached
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace

Command = Literal["caption", "sample"]
JobState = Literal["starting", "running", "ended", "did not start"]

_WORDS = {
    "caption": ("captions", "written"),
    "sample": ("steps", "compared"),
    "prune": ("pruning", "done"),
}
"""What each command makes that no run may start next to, and what is done to it."""
_MOST_BYTES = 256 << 20
_LAST_SECONDS = 5.0
_LONGEST_NAME = 150
"""Of a folder in the name of a file, in bytes; file systems allow 255 for all of it."""
_PAUSE_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Job:
    """The latest command that the screen started for a purpose, by this server or one before it.

    Attributes:
        file: with what is here; its log and its exit code are next to it, with other endings.
        folder: of the data set, run or cache that it is about.
        words: of the command, to which the workspace is the working folder; none before there was one.
        process: that was started, as :class:`Process` writes it.
        started_at: seconds since 1970.
        was_signalled: whether it was asked to stop.
        note: what its starter keeps with it.
    """

    file: Path
    folder: Path = Path()
    words: tuple[str, ...] = ()
    process: str = ""
    started_at: float = 0.0
    was_signalled: bool = False
    note: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, workspace: Workspace, purpose: str, folder: Path) -> "Job":
        """The latest one for a folder, whose name others may have, too."""
        folder = folder.resolve()
        name = os.fsencode(folder.name)[:_LONGEST_NAME].decode(errors="ignore")
        digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]
        return replace(cls.read(workspace.logs_folder / f"{purpose}-{name}-{digest}.json"), folder=folder)

    @classmethod
    def read(cls, file: Path) -> "Job":
        """The one that a file describes."""
        with suppress(OSError, UserError, ValueError):
            return replace(_AS_JSON.validate_json(read_bytes(file, most_bytes=_MOST_BYTES)), file=file)
        return cls(file=file)

    def start(
        self,
        words: Sequence[str],
        workspace: Workspace,
        *,
        note: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (".log",),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start another one, in a session of its own, unless this one runs.

        Args:
            outputs: endings of the files for what it prints and, last, for what it logs.
            variables: of its environment, in addition to those of this process.
        """
        with locked(self.with_ending(".lock")), ExitStack() as opened:
            if (latest := Job.read(self.file)).is_alive:
                raise UserError(f"{latest.command_line} runs; wait until it has ended")
            for output in outputs:  # A link in its place may lead to any file.
                self.with_ending(output).unlink(missing_ok=True)
            logs = [opened.enter_context(self.with_ending(output).open("wb")) for output in outputs]
            job = replace(
                self, words=tuple(words), started_at=now(), was_signalled=False, note=dict(note or {})
            )
            command = [sys.executable, "-m", "diffsynth_lite.cli.main", *words]
            try:
                child = start_detached(
                    command, cwd=workspace.path, log=logs[0], errors=logs[-1], variables=variables
                )
            except OSError as error:
                raise UserError(f"{words[0]} cannot be started: {error.strerror}") from None
            process = Process.of(child.pid)

            def wait() -> None:  # or it would stay as a zombie
                ended = {"process": process.as_text(), "exit_code": child.wait()}
                with suppress(OSError):  # Without it nobody knows how it ended.
                    write_json(self.with_ending(".ended"), ended)

            threading.Thread(target=wait, daemon=True).start()
            try:
                replace(job, process=process.as_text())._write()
            except OSError:  # Nobody could find it, nor stop it.
                process.interrupt()
                raise

    def stop(self) -> None:
        """Ask it to end, once: the second signal would end it at once."""
        with locked(self.with_ending(".lock")):
            latest = Job.read(self.file)
            if latest.is_alive and not latest.was_signalled:
                interrupt(latest.process)
                with suppress(OSError):  # A full disk is when somebody wants to stop.
                    replace(latest, was_signalled=True)._write()

    @property
    def is_alive(self) -> bool:
        """Whether it runs; one of another machine, as of a container before this one, does not run here."""
        process = Process.from_text(self.process)
        return process is not None and process.is_here() and process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and where the server was gone when it ended."""
        with suppress(OSError, UserError, ValueError, LookupError, TypeError):
            ended = parse_json(read_bytes(self.with_ending(".ended"), most_bytes=_MOST_BYTES))
            return int(ended["exit_code"]) if ended["process"] == self.process else None
        return None

    @property
    def outcome(self) -> str:
        """How far it is, in a word."""
        return "Running" if self.is_alive else {0: "Done", None: "Ended"}.get(self.exit_code, "Failed")

    @property
    def command_line(self) -> str:
        """The command as it is typed in the workspace."""
        return command_line(self.words)

    @property
    def state(self) -> JobState:
        """How far it has come with captions."""
        has_come = written_at(CaptionReport(self.folder).status_file) >= self.started_at
        if self.is_alive:
            return "running" if has_come else "starting"
        return "ended" if has_come or not self.words else "did not start"

    @property
    def works(self) -> bool:
        """Whether it has more to do, or is only about to end."""
        is_caption = self.words[:1] == ("caption",)
        is_ending = is_caption and self.state == "running" and not captions_in(self.folder)
        return self.is_alive and not is_ending

    def log(self, num_lines: int) -> list[str]:
        """The last lines that it logged, with secrets masked."""
        return log_lines(self.with_ending(".log"), num_lines=num_lines)

    def with_ending(self, ending: str) -> Path:
        """Another file of it."""
        return self.file.with_suffix(ending)

    def _write(self) -> None:
        write_json(self.file, asdict(self) | {"file": self.file.name, "folder": str(self.folder)})


_AS_JSON = TypeAdapter(Job)


class Jobs:
    """Captions and comparisons of steps in a workspace, which use the device of this machine by turns."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._queue = Queue(workspace)

    def of(self, folder: Path, command: Command = "caption") -> Job:
        """The latest one for a data set, or a run."""
        return Job.of(self._workspace, command, folder)

    def start(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        command: Command = "caption",
        free_device: Callable[[], None] = lambda: None,
    ) -> None:
        """Start a command.

        Args:
            free_device: ends what only keeps a model on the device, once nothing refuses the command.

        Raises:
            UserError: it runs there already, something else has the device, or it cannot be started.
        """
        things, done = _WORDS[command]
        _await_end(self.of(folder, command))
        with self._queue.changing():  # No worker starts a run meanwhile.
            job = self.of(folder, command)
            if captions_in(folder) is not None or job.is_alive:
                raise UserError(f"{things} of {folder.name} are being {done} already; stop that first")
            if uses_device(arguments) and (holder := self._holder()):
                raise UserError(
                    f"this device is in use: {holder}; stop that first, or wait until it has ended"
                )
            if uses_device(arguments):
                free_device()
            job.start([command, *arguments], self._workspace)

    def stop(self, folder: Path, *, command: Command = "caption") -> None:
        """Have the command stop that works in a folder, also where a terminal started it."""
        job, status = self.of(folder, command), captions_in(folder)
        if job.is_alive:
            job.stop()
        elif status is not None:
            interrupt(status.process)
        else:
            things, done = _WORDS[command]
            raise UserError(f"no {things} of {folder.name} are being {done} on this machine")

    def holders(self) -> list[str]:
        """What uses the device of this machine besides runs, such as "captions of mug"."""
        names = list[str]()
        for command, (things, _) in _WORDS.items():
            for job in map(Job.read, sorted(self._workspace.logs_folder.glob(f"{command}-*.json"))):
                if uses_device(job.words) and job.works:
                    names.append(f"{things} of {job.folder.name}")
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


def command_line(words: Sequence[str]) -> str:
    """A command as it is typed in the workspace."""
    return shlex.join(["diffsynth-lite", *words])


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
    """Whether a command keeps others from the device of this machine.

    All do but captions of an endpoint, and a look at what may be deleted from a cache.
    """
    is_look = tuple(arguments[:1]) == ("cache",) and "--dry-run" in arguments
    return not is_look and not any(word.partition("=")[0] == "--endpoint" for word in arguments)


def interrupt(process: str) -> None:
    """Ask a process, as :class:`Process` writes it, to end."""
    if (found := Process.from_text(process)) is not None:
        found.interrupt()
