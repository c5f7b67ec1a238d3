"""The output folder of a run: its paths, ``status.json``, and the lock that keeps a second trainer out."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from diffsynth_lite.errors import (
    EXIT_FINISHED,
    DifferentRunError,
    RunDivergedError,
    RunInterrupted,
    RunStoppedError,
    UserError,
    exit_code,
)
from diffsynth_lite.files import DISK_FULL, is_unfinished, parse_json, sync, write_json, write_json_over
from diffsynth_lite.run_folder.lock import open_lock
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.run_folder.reading import read_run_file

logger = logging.getLogger(__name__)

RunState = Literal["running", "finished", "interrupted", "stopped", "diverged", "failed"]

REQUEST_FILES = {"stop": "STOP", "save": "SAVE", "sample": "SAMPLE"}
"""What a run can be asked for, and the name of the file that asks for it, of any content: a person puts it
into the run folder, and the run removes it when it sees it."""

_LOCK_NAME = ".lock"
_REMOVAL_S = 2.0
"""Time in which a removal of the run folder, with the lock as its first file, is most likely finished."""
_QUARANTINE_NAME = "quarantine.jsonl"
_MANIFESTS = "step-*/COMPLETE"
"""Pattern of checkpoints, below their folder."""


class _Place:
    """A file or folder of a run folder, by its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunFolder", owner: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run folder, and its lock. It stores nothing that breaks when it is moved."""

    path: Path
    _locked: list[IO[str]] = field(default_factory=list, init=False, repr=False, compare=False)

    lock_file = _Place(_LOCK_NAME)
    """Locked by the process that trains."""
    config_file = _Place("config.yaml")
    """The yaml as given."""
    resolved_file = _Place("resolved.yaml")
    """The configuration with its defaults."""
    command_file = _Place("command.json")
    """How the run was started last: the arguments, where, and in how many processes."""
    fingerprint_file = _Place("contract.json")
    """The run's fingerprint, which a start compares with its own before there is a checkpoint."""
    lineage_file = _Place("lineage.json")
    """Each start of the run, and what was changed then."""
    status_file = _Place("status.json")
    """State, exit code, step and, while it runs, speed: for people and programs that watch the run."""
    metrics_file = _Place("metrics.jsonl")
    """One row for each logged step."""
    items_file = _Place("items.jsonl")
    """The training items whose losses are measured one by one."""
    item_losses_file = _Place("item_losses.jsonl")
    """One row for each evaluation, with the losses of these items."""
    sample_losses_file = _Place("sample_losses.jsonl")
    """One row for each logged step, with the losses of samples."""
    layers_file = _Place("layers.jsonl")
    """One row for each evaluation, with the size of the update to each layer."""
    chosen_file = _Place("chosen.json")
    """Which LoRA a person chose."""
    report_file = _Place("report.html")
    """The page of the run."""
    quarantine_file = _Place(_QUARANTINE_NAME)
    """Items that cannot be used, and why."""
    held_out_file = _Place("held_out.jsonl")
    """Items that are held out of training."""
    checkpoints_folder = _Place("checkpoints")
    """Where the run can be continued from."""
    previews_folder = _Place("previews")
    """Previews, and their grid."""
    scored_folder = _Place("previews/scores")
    """The images that steps are scored by."""
    scores_file = _Place("scores.json")
    """The scores of the base and of steps."""
    samples_folder = _Place("samples")
    """Images and videos generated on demand, a folder for each time."""
    best_lora_folder = _Place("lora_best")
    """The export with the lowest loss on held-out data, or that the scores recommend."""
    ema_lora_folder = _Place("lora_ema")
    """The latest export of the averaged weights."""
    lora_folder = _Place("lora")
    """The latest export."""

    converted_folder = _Place("converted")
    """LoRAs that were converted for other programs, a folder for each format."""

    @property
    def row_files(self) -> tuple[Path, ...]:
        """Files of rows by step, which a resumed run continues."""
        return self.metrics_file, self.item_losses_file, self.sample_losses_file, self.layers_file

    def holds_run(self) -> bool:
        """Whether a run has been started here, as far as the folder can be read.

        ``status.json`` is the first file that a run writes; where it was lost, a checkpoint shows it.
        """
        with suppress(OSError):
            return b'"found_at"' in self._status_bytes() or self.has_checkpoints()
        return False

    def has_checkpoints(self) -> bool:
        """Whether a run can be resumed from a checkpoint here, unless that is damaged."""
        return any(self.checkpoints_folder.glob(_MANIFESTS))

    def is_new(self) -> bool:
        """Whether no run has been started here, not even one that has no status yet, or no longer."""
        return not (self.holds_run() or self._was_begun(self.command_file))

    def sync_rows(self) -> None:
        """Wait until the rows by step are on the disk: before a checkpoint that is later than they are."""
        for file in self.row_files:
            if file.exists():
                sync(file)
        sync(self.path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Make the folder if need be, and keep other trainers out of it while the ``with`` block runs.

        The lock ends with the process that holds it, however it ends.
        """
        self._prepare()
        try:
            self._take_lock()
            yield
        finally:
            while self._locked:
                self._locked.pop().close()

    def write_status(
        self,
        state: RunState,
        *,
        exit_code: int | None,
        step: int,
        message: str,
        progress: Mapping[str, float | str] | None = None,
    ) -> None:
        """Replace ``status.json``; the first call, under the lock, makes this the folder of a run.

        On a full disk the status of a run that ended is written over the old file, in place.

        Args:
            exit_code: None while the trainer runs.

        Raises:
            OSError: the disk is full, or fails.
        """
        self.require_held()
        places = (
            *(self.checkpoints_folder, self.lora_folder, self.ema_lora_folder, self.best_lora_folder),
            *(self.metrics_file, self.previews_folder),
        )
        found = {place.stem: place.name for place in places if place.exists()}
        outcome = {"state": state, "exit_code": exit_code, "step": step, "message": message}
        status = {**outcome, "time": round(time.time(), 3), **(progress or {}), "found_at": found}
        try:
            write_json(self.status_file, status)
        except OSError as error:
            if exit_code is None or error.errno not in DISK_FULL:
                raise
            write_json_over(self.status_file, status)

    def read_status(self) -> dict[str, Any] | None:
        """Content of ``status.json``; None before a run has been started, and where the file is damaged."""
        if not self.holds_run():
            return None
        try:
            status = parse_json(self._status_bytes())
        except ValueError:
            return None
        return status if isinstance(status, dict) else None

    def has_lost_status(self) -> bool:
        """Whether a run has been started here whose status is lost."""
        return self.read_status() is None and (self.holds_run() or self._was_begun())

    def require_held(self) -> None:
        """Check that the folder is still the one that this process has locked.

        Somebody may have renamed or removed it, and then begun another run under its name. Where only the
        lock was removed, it is taken again.
        """
        lacks_lock = self._locked and not self.lock_file.exists()
        if lacks_lock and self.path.is_dir():
            time.sleep(_REMOVAL_S)  # A removal of the folder may have begun with this file.
        if not self.path.is_dir() or (lacks_lock and self._is_of_others()):
            raise RunStoppedError(folder_is_gone(self.path))
        if lacks_lock:
            logger.warning("%s was removed; it is made again.", self.lock_file)
            self._take_lock()
        holder = self._holder()
        # Compared by the number only: the name of a host may change during a run.
        if holder is not None and holder.pid != os.getpid():
            raise RunStoppedError(
                f"output.dir: {self.path} was renamed or removed, and {holder} has begun a run under its "
                "name; this run can be continued from where its folder is now, with that as its output.dir"
            )

    def is_abandoned(self) -> bool:
        """Whether the trainer that took the lock last is gone, as far as this machine knows.

        This takes no lock, as a reader must not keep a trainer out.
        """
        holder = self._holder()
        return holder is not None and not holder.is_alive()

    def trains_here(self) -> bool:
        """Whether a trainer of this machine runs in the folder now, as far as that can be known."""
        holder = self._holder()
        return holder is not None and holder.is_here() and self.trains()

    def trains(self) -> bool:
        """The same of any machine, of which only this one knows whether the trainer is alive."""
        holder, status = self._holder(), self.read_status()
        is_alive = holder is not None and holder.is_alive()
        return is_alive and status is not None and status.get("state") == "running"

    @property
    def node(self) -> str:
        """Name of the machine of the trainer that took the lock last, if it is another one; else empty."""
        holder = self._holder()
        return "" if holder is None or holder.is_here() else holder.host

    def changes(self) -> object:
        """A value that changes when anything changes here that a page of the run shows.

        Files that cannot be reached count as not there.
        """
        found = []
        with suppress(OSError):
            for entry in self.path.iterdir():
                if entry.name == self.report_file.name or is_unfinished(entry.name):
                    continue
                with suppress(OSError):
                    status = entry.stat()
                    found.append((entry.name, status.st_mtime_ns, status.st_size))
        return sorted(found), self.is_abandoned()

    def card_changes(self) -> object:
        """The same of what a list of many runs shows, by five looks, but for whether the trainer is gone.

        Other files are written by a rename, which changes the folder itself.
        """
        found = []
        for name in ("", "status.json", "metrics.jsonl", "previews", "checkpoints"):
            with suppress(OSError):
                status = os.stat(f"{self.path}/{name}")  # noqa: PTH116  (a tenth of the time of a Path's)
                found.append((name, status.st_mtime_ns, status.st_size))
        return found

    def _status_bytes(self) -> bytes:
        try:
            return read_run_file(self.status_file)
        except (OSError, UserError):
            return b""

    def _holder(self) -> Process | None:
        """The process that took the lock last; None if no trainer did, or the file was lost."""
        try:
            return Process.from_text(read_run_file(self.lock_file).decode())
        except (OSError, ValueError):
            return None

    def _is_of_others(self) -> bool:
        """Whether a folder without our lock is not ours: a library may have made it again during a save.

        Then our lock has a name in a folder that was renamed, or the status, too, was removed.
        """
        return os.fstat(self._locked[-1].fileno()).st_nlink > 0 or not self.status_file.exists()

    def _was_begun(self, *files: Path) -> bool:
        """Whether a trainer has locked the folder and left a file here: its status may have been lost.

        Args:
            files: that count, too.
        """
        left = *files, self.status_file, self.fingerprint_file, self.metrics_file, self.report_file
        return self._holder() is not None and any(file.exists() for file in left)

    def _require_kinds(self) -> None:
        """Check that nothing is in the place of the run's files: a file for a folder, a dead link."""
        folders = (
            *(self.checkpoints_folder, self.previews_folder, self.samples_folder),
            *(self.lora_folder, self.ema_lora_folder, self.best_lora_folder),
        )
        files = (
            *(self.config_file, self.resolved_file, self.command_file),
            *(self.fingerprint_file, self.lineage_file, self.chosen_file),
            *(self.status_file, self.items_file, self.quarantine_file, self.held_out_file, *self.row_files),
        )
        wrong = [f"{path} is not a folder" for path in folders if os.path.lexists(path) and not path.is_dir()]
        wrong += [f"{path} is not a file" for path in files if os.path.lexists(path) and not path.is_file()]
        lock = self.lock_file
        if lock.is_symlink() or (lock.exists() and not lock.is_file()):
            wrong.append(f"{lock} is not a regular file")  # the target of a link would be emptied
        if wrong:
            raise UserError(f"output.dir: {'; '.join(wrong)}: move aside what is there")

    def _prepare(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output folder {self.path} is a file: give a new or empty folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output folder {self.path} cannot be made: {error.strerror}") from error
        if self.is_new() and any(map(_is_foreign, self.path.iterdir())):
            raise UserError(
                f"output folder {self.path} is not empty and holds no run: give a new or empty folder "
                "(nothing in this one was changed)"
            )
        self._require_kinds()

    def _take_lock(self) -> None:
        try:
            lock = open_lock(self.lock_file, place=f"output folder {self.path}")
        except OSError as error:
            raise UserError(f"output.dir: {self.path} cannot be written to: {error.strerror}") from error
        self._locked.append(lock.file)
        if lock.is_locked:  # No other process writes: unfinished files are left from killed writers.
            written = (
                *(self.scored_folder, self.lora_folder, self.ema_lora_folder, self.best_lora_folder),
                self.converted_folder,
            )
            inside = [entry for folder in written for entry in folder.rglob("*")]
            for entry in (*self.path.glob("*"), *self.previews_folder.glob("*"), *inside):
                if is_unfinished(entry.name) and entry.is_file():
                    entry.unlink(missing_ok=True)


def find_runs(places: Sequence[Path]) -> dict[str, Path]:
    """The run folders among some places and directly in them, in this order, each by a name of its own.

    The name is the folder's, with as many of those above it as make all names different.
    """
    found: dict[Path, Path] = {}
    resolve = resolver()
    for place in places:
        is_run = RunFolder(place).holds_run()
        inner = [place] if is_run else sorted(place.glob("*"))
        found |= {resolve(folder): folder for folder in inner if is_run or RunFolder(folder).holds_run()}
    depth = 1
    while len({folder.parts[-depth:] for folder in found}) < len(found):
        depth += 1
    return {"/".join(resolved.parts[-depth:]): folder for resolved, folder in found.items()}


def resolver() -> Callable[[Path], Path]:
    """A function that is ``Path.resolve`` for many folders in few places, each of which is resolved once."""
    places: dict[Path, Path] = {}

    def resolve(folder: Path) -> Path:
        if folder.name in ("", "..") or folder.is_symlink():
            return folder.resolve()
        if (place := places.get(folder.parent)) is None:
            place = places[folder.parent] = folder.parent.resolve()
        return place / folder.name

    return resolve


@contextmanager
def outcome_recorded(
    folder: RunFolder, saved_step: Callable[[], int], *, start_step: int, total_steps: int
) -> Iterator[list[str]]:
    """Scope of a run: ``status.json`` shows that it is running, and afterwards how it ended.

    Remarks in the list become part of the message of a run that finished. A run that turns out to be a
    different one leaves the status as it was.

    Args:
        saved_step: returns the step of the newest checkpoint, for the status of a run that ends early.
    """
    remarks: list[str] = []
    with _end_recorded(folder, saved_step, DifferentRunError):
        folder.write_status("running", exit_code=None, step=start_step, message="started")
        yield remarks
    message = "; ".join(["finished", *remarks])
    folder.write_status("finished", exit_code=EXIT_FINISHED, step=total_steps, message=message)


@contextmanager
def preparation_recorded(folder: RunFolder, saved_step: Callable[[], int]) -> Iterator[None]:
    """Scope before a run begins, whose status may show what is prepared, and afterwards is as it was.

    Where it ends early the status shows how; a run that is there keeps its own if its command was wrong.

    Args:
        saved_step: as in :func:`outcome_recorded`.
    """
    before = folder.read_status()
    with _end_recorded(folder, saved_step, UserError):
        yield
    if before is not None and folder.read_status() != before:
        write_json(folder.status_file, before)
    elif before is None and folder.read_status() is not None:
        folder.status_file.unlink()


@contextmanager
def _end_recorded(
    folder: RunFolder, saved_step: Callable[[], int], left_out: type[UserError]
) -> Iterator[None]:
    """Scope after which the status shows how it ended, where that was by an error.

    Args:
        left_out: an error that leaves the status of an earlier start as it was.
    """
    before = folder.read_status()
    try:
        yield
    except BaseException as error:
        try:
            if isinstance(error, left_out) and before is not None:
                write_json(folder.status_file, before)
            else:
                message, step = str(error) or type(error).__name__, saved_step()
                folder.write_status(_state(error), exit_code=exit_code(error), step=step, message=message)
        except (OSError, RunStoppedError, UserError) as failure:
            # A full disk, or a folder that is gone, takes no status; the cause of the end matters more.
            if str(failure) != str(error):
                logger.warning("%s could not be written: %s", folder.status_file, failure)
        raise


def folder_is_gone(path: Path) -> str:
    """The message about a run folder that is not there any more."""
    return (
        f"output.dir: {path} was renamed or removed while the run wrote to it. Where it was renamed, its "
        "checkpoints are in it: put it back, and the same command continues the run from the last one"
    )


def _state(error: BaseException) -> RunState:
    if isinstance(error, RunInterrupted):
        return "interrupted"
    if isinstance(error, RunDivergedError):
        return "diverged"
    return "stopped" if isinstance(error, RunStoppedError) else "failed"


def _is_foreign(path: Path) -> bool:
    """Whether no trainer that ended before its first status can have left a file."""
    return path.name not in (_LOCK_NAME, _QUARANTINE_NAME) and not is_unfinished(path.name)
