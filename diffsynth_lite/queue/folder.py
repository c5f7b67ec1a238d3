"""This file is the queue of a workspace: which runs wait, run and are done, and how a person changes that.

An entry is a file. Its state is the folder that the file is in, its place is the number in its name, and
``PAUSED`` is a file, too, with the reason as its text. Nothing else is remembered.
"""

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal, get_args

from pydantic import StringConstraints, TypeAdapter

from diffsynth_lite.errors import Problems, UserError
from diffsynth_lite.files import DISK_FULL, read_bytes, write_bytes, write_text
from diffsynth_lite.queue.entry import STATES, Entry, QueuedRun, QueueState, named, read_state
from diffsynth_lite.queue.locks import is_locked, locked, take_lock
from diffsynth_lite.queue.outcome import ended
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.workspace import Workspace

Place = Literal["first", "up", "down", "last"]

_STEP = 1000
"""Between the numbers of entries that are added one after the other; one that moves gets one between them."""
_LONGEST_NAME = 200
_CLOCK_OF_FILES = 5
"""``CLOCK_REALTIME_COARSE`` of Linux, which Python does not name."""
_MOST_BYTES = 1 << 16
_MOST_ADDED_BYTES = 64 << 20
_KEPT_S = 24 * 60 * 60
_ADDING = TypeAdapter(
    dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{8,}-[^/\\\x00]+\.json$")], Entry]
)
"""What is being added at once, by name of its file."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The queue at a moment.

    Attributes:
        runs: those that run, those that wait in their order, and those that are done, the latest last.
        paused: why nothing more is started; None where it is not paused.
        is_worked: whether a worker starts what waits.
    """

    runs: Sequence[QueuedRun]
    paused: str | None
    is_worked: bool

    def in_state(self, state: QueueState) -> list[QueuedRun]:
        """The runs in a state, in their order."""
        return [run for run in self.runs if run.state == state]


class Queue:
    """The queue of a workspace; commands, screens and a worker may use it at the same time."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.path = workspace.path / "queue"
        self._paused_file = self.path / "PAUSED"
        self._worker_file = self.path / ".worker"
        self._adding_file = self.path / ".adding"

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Scope in which nobody else changes the queue.

        Raises:
            UserError: its folder cannot be written to, or leads out of the workspace.
        """
        with ExitStack() as held:
            try:
                self._make_folders()
                held.enter_context(locked(self.path / ".lock"))
            except OSError as error:
                raise UserError(f"{self.path}: cannot be written to: {error.strerror}") from None
            self._complete()
            yield

    def snapshot(self) -> Snapshot:
        """How it is now; runs that have ended without a worker are put to those that are done."""
        if not self.path.is_dir():
            return Snapshot(runs=[], paused=None, is_worked=False)
        with self.changing():
            is_worked = is_locked(self._worker_file)
            if not is_worked:
                self.settle()
            done = sorted(self.in_state("done"), key=lambda run: run.ended_at)
            runs = [*self.in_state("running"), *self.in_state("waiting"), *done]
            return Snapshot(runs=runs, paused=self.paused(), is_worked=is_worked)

    def add(self, entries: Sequence[Entry]) -> list[QueuedRun]:
        """Put runs behind those that wait, all or none."""
        with self.changing():
            known = [run for state in STATES for run in self.in_state(state)]
            self._require_new(entries, known)
            taken = {run.name for run in known if run.state != "done"}
            number = max((run.number for run in known), default=0)
            added: dict[str, Entry] = {}
            for entry in entries:
                number += _STEP
                name = _free_name(entry.folder_in(self.workspace).name, taken)
                taken.add(name)
                added[_file_name(number, name)] = entry
            try:
                if len(added) > 1:
                    write_bytes(self._adding_file, _ADDING.dump_json(added, exclude_defaults=True))
                for name, entry in added.items():
                    write_entry(self.path / "waiting" / name, entry)
            except (OSError, ValueError) as error:  # the latter for a name that is not UTF-8
                for name in added:
                    (self.path / "waiting" / name).unlink(missing_ok=True)
                raise UserError(f"{self.path}: nothing was added: {error}") from None
            finally:
                self._adding_file.unlink(missing_ok=True)
            return [run for run in self.in_state("waiting") if run.file.name in added]

    def move(self, name: str, place: Place) -> None:
        """Change the place of a run that waits."""
        if place not in get_args(Place):
            raise UserError(f"{place}: is not a place; there are {', '.join(get_args(Place))}")
        with self.changing():
            waiting = self.in_state("waiting")
            run = named(waiting, name)
            at = waiting.index(run)
            others = [other for other in waiting if other.file != run.file]
            to = {"first": 0, "up": max(at - 1, 0), "down": min(at + 1, len(others)), "last": len(others)}
            self._put(run, others, to[place])

    def remove(self, name: str) -> QueuedRun:
        """Take a run that waits, or one that is done, out of the queue; its folder stays as it is."""
        with self.changing():
            run = named([run for state in STATES for run in self.in_state(state)], name)
            if run.state == "running" and self.is_alive(run):
                folder = run.entry.folder if run.entry else run.name
                raise UserError(f"{run.name}: runs; a file named STOP in {folder} stops it")
            run.file.unlink(missing_ok=True)
            self.log_file(run).unlink(missing_ok=True)
            return run

    def pause(self, reason: str = "") -> None:
        """Start no more; what runs goes on."""
        with self.changing():
            self.write_pause(reason)

    def unpause(self) -> None:
        """Allow that runs are started, which a worker does."""
        with self.changing():
            try:
                self._paused_file.unlink(missing_ok=True)
            except OSError as error:
                raise UserError(f"{self._paused_file}: cannot be removed: {error.strerror}") from None

    def write_pause(self, reason: str) -> None:
        """As :meth:`pause`, within :meth:`changing`; a full disk takes the file without its text."""
        try:
            write_text(self._paused_file, reason)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self._paused_file.touch()

    def paused(self) -> str | None:
        """Why nothing more is started, which may be empty; None where it is not paused."""
        try:
            return read_bytes(self._paused_file, most_bytes=_MOST_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except (OSError, UserError):  # Something is there, whatever it is.
            return ""

    def is_worked(self) -> bool:
        """Whether a worker starts what waits."""
        with self.changing():
            return is_locked(self._worker_file)

    @contextmanager
    def work_lock(self) -> Iterator[ExitStack]:
        """Scope of the only worker, which closes what it gets when it ends, within :meth:`changing`."""
        with ExitStack() as held:
            with self.changing():
                file = held.enter_context(self._worker_file.open("ab"))
                if not take_lock(file):
                    raise UserError(f"{self.path}: another worker starts these runs")
            yield held

    def in_state(self, state: QueueState) -> list[QueuedRun]:
        """The runs in a state, in their order."""
        return read_state(self.path / state, state, self.workspace)

    def log_file(self, run: QueuedRun) -> Path:
        """What the process of a run prints, which has its lock for as long as it lives."""
        return self.path / "logs" / f"{run.id}.log"

    def open_log(self, file: Path) -> IO[bytes]:
        """Open a log to add to it; a link in its place, which may lead to any file, is removed."""
        if file.is_symlink():
            file.unlink()
        return file.open("ab")

    def is_alive(self, run: QueuedRun) -> bool:
        """Whether the process of a run goes on, whoever started it; asked within :meth:`changing`."""
        if os.name != "nt":
            return is_locked(self.log_file(run))
        process = Process.from_text(run.entry.process) if run.entry else None
        return process is not None and process.is_here() and process.is_alive()

    def settle(self) -> None:
        """Put runs that have ended to those that are done; called within :meth:`changing`."""
        for run in self.in_state("running"):
            if not self.is_alive(run):
                self.finish(run, self.result(run, None))

    def result(self, run: QueuedRun, exit_code: int | None) -> Entry | None:
        """The content of an entry whose run has ended; None where it cannot be read.

        Args:
            exit_code: of its process; None where nobody knows it.
        """
        if run.entry is None:
            return None
        return ended(run.entry, self.workspace, exit_code=exit_code, log=self.log_file(run), at=now())

    def finish(self, run: QueuedRun, result: Entry | None) -> bool:
        """Put a run to those that are done; False on a full disk, which takes no result."""
        try:
            self.put(run, "done", result)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            self.put(run, "done")
            return False
        self._prune()
        return True

    def put(self, run: QueuedRun, state: QueueState, entry: Entry | None = None) -> QueuedRun:
        """Put a run into another state, with another content if given; called within :meth:`changing`.

        Raises:
            OSError: the content cannot be written; the run stays where it is.
        """
        if entry is not None:
            write_entry(run.file, entry)
        file = run.file.replace(self.path / state / run.file.name)
        return QueuedRun.read(file, state, self.workspace) or run

    def run_of_others(self) -> RunFolder | None:
        """A run of the workspace that trains on this machine and that the queue has not started."""
        ours = {entry.folder_in(self.workspace) for run in self.in_state("running") if (entry := run.entry)}
        runs = [RunFolder(folder) for folder in self.workspace.runs.values() if folder.resolve() not in ours]
        return next((run for run in runs if run.trains_here()), None)

    def _make_folders(self) -> None:
        for folder in (self.path / name for name in (*STATES, "logs")):
            folder.mkdir(parents=True, exist_ok=True)
            if folder.resolve().parents[1] != self.workspace.path.resolve():
                raise UserError(f"{folder}: is a link; put a folder in its place")

    def _complete(self) -> None:
        """Add what a process had begun to add when it was killed, so that all of it waits."""
        try:
            added = _ADDING.validate_json(read_bytes(self._adding_file, most_bytes=_MOST_ADDED_BYTES))
        except FileNotFoundError:
            return
        except (OSError, UserError, ValueError):  # somebody else's
            added = {}
        with suppress(OSError):  # A full disk is left for later.
            for name, entry in added.items():
                if not any((self.path / state / name).exists() for state in STATES):
                    write_entry(self.path / "waiting" / name, entry)
            self._adding_file.unlink(missing_ok=True)

    def _prune(self) -> None:
        """Remove what is done where the same run was started again: a day after its end, with its log."""
        latest: dict[Path, QueuedRun] = {}
        for run in sorted(self.in_state("done"), key=lambda run: run.ended_at):
            if run.entry is not None:
                folder = run.entry.folder_in(self.workspace)
                older = latest.get(folder)
                latest[folder] = run
                if older is not None and older.ended_at < now() - _KEPT_S:
                    older.file.unlink(missing_ok=True)
                    self.log_file(older).unlink(missing_ok=True)

    def _require_new(self, entries: Sequence[Entry], known: Sequence[QueuedRun]) -> None:
        problems = Problems()
        pending = [(run, entry) for run in known if run.state != "done" and (entry := run.entry)]
        taken = {entry.folder_in(self.workspace): run.state for run, entry in pending}
        for entry in entries:
            folder = entry.folder_in(self.workspace)
            if folder in taken:
                problems.append(f"output.dir: {entry.folder}: is in the queue already ({taken[folder]})")
            taken[folder] = "waiting"
        problems.require_none()

    def _put(self, run: QueuedRun, others: list[QueuedRun], place: int) -> None:
        """Give a run a number between those of its new neighbours, by one rename."""
        numbers = [other.number for other in others]
        before = numbers[place - 1] if place else 0
        after = numbers[place] if place < len(others) else before + 2 * _STEP
        number = (before + after) // 2
        is_free = not any((self.path / state / _file_name(number, run.name)).exists() for state in STATES)
        if before < number < after and is_free:
            run.file.rename(run.file.with_name(_file_name(number, run.name)))
            return
        known = [each.number for state in STATES for each in self.in_state(state)]
        first = max(known, default=0) + _STEP
        order = [*others[:place], run, *others[place:]]
        for position, each in reversed(list(enumerate(order))):
            each.file.rename(each.file.with_name(_file_name(first + position * _STEP, each.name)))


def write_entry(file: Path, entry: Entry) -> None:
    """Write a file of the queue, or replace it, durably."""
    write_text(file, entry.model_dump_json(indent=2, exclude_defaults=True) + "\n")


def now() -> float:
    """Seconds since 1970 by the clock of files, which is some milliseconds late, so that they compare."""
    seconds = time.clock_gettime(_CLOCK_OF_FILES) if sys.platform == "linux" else time.time()
    return math.floor(1000 * seconds) / 1000


def _file_name(number: int, name: str) -> str:
    return f"{number:08d}-{name}.json"


def _free_name(name: str, taken: set[str]) -> str:
    """A name for a run: that of its folder, with a number where that is taken."""
    first, number = os.fsencode(name)[:_LONGEST_NAME].decode(errors="ignore"), 1
    while (found := first if number == 1 else f"{first}~{number}") in taken:
        number += 1
    return found
