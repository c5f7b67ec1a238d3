"""The output folder of a run: its paths, ``status.json``, and the lock that keeps a second trainer out."""

import json
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from diffsynth_lite.files import is_unfinished, sync, write_json

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

RunState = Literal["running", "finished", "interrupted", "stopped", "diverged", "failed"]

_LOCK_NAME = ".lock"
_LOCK_HOLDER = r"process (?P<process>\d+) on (?P<host>.+)"
_QUARANTINE_NAME = "quarantine.jsonl"
_MANIFESTS = "step-*/COMPLETE"
"""Of checkpoints, below their folder."""


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run folder. It stores nothing that breaks when it is moved."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The yaml as given."""
        return self.path / "config.yaml"

    @property
    def resolved_file(self) -> Path:
        """The configuration with its defaults."""
        return self.path / "resolved.yaml"

    @property
    def fingerprint_file(self) -> Path:
        """The run's fingerprint, which a start compares with its own before there is a checkpoint."""
        return self.path / "contract.json"

    @property
    def lineage_file(self) -> Path:
        """Each start of the run, and what was changed then."""
        return self.path / "lineage.json"

    @property
    def status_file(self) -> Path:
        """State, exit code, step and, while it runs, speed: for whoever started or watches the run."""
        return self.path / "status.json"

    @property
    def metrics_file(self) -> Path:
        """One row for each logged step."""
        return self.path / "metrics.jsonl"

    @property
    def items_file(self) -> Path:
        """The training items whose losses are measured one by one."""
        return self.path / "items.jsonl"

    @property
    def item_losses_file(self) -> Path:
        """One row for each evaluation, with the losses of these items."""
        return self.path / "item_losses.jsonl"

    @property
    def layers_file(self) -> Path:
        """One row for each evaluation, with the size of the update to each layer."""
        return self.path / "layers.jsonl"

    @property
    def row_files(self) -> tuple[Path, ...]:
        """Files of rows by step, which a run that goes on takes up where it does."""
        return self.metrics_file, self.item_losses_file, self.layers_file

    @property
    def report_file(self) -> Path:
        """The page of the run."""
        return self.path / "report.html"

    @property
    def quarantine_file(self) -> Path:
        """Items that cannot be used, and why."""
        return self.path / _QUARANTINE_NAME

    @property
    def checkpoints_folder(self) -> Path:
        """Where the run can be continued from."""
        return self.path / "checkpoints"

    @property
    def previews_folder(self) -> Path:
        """Sampled pictures, and their grid."""
        return self.path / "previews"

    @property
    def samples_folder(self) -> Path:
        """Pictures drawn on demand, a folder for each time."""
        return self.path / "samples"

    @property
    def best_lora_folder(self) -> Path:
        """The export with the lowest loss on held-out data."""
        return self.path / "lora_best"

    @property
    def ema_lora_folder(self) -> Path:
        """The latest export of the averaged weights."""
        return self.path / "lora_ema"

    @property
    def lora_folder(self) -> Path:
        """The latest export."""
        return self.path / "lora"

    def holds_run(self) -> bool:
        """Whether a run has been started here.

        ``status.json`` is the first file that a run writes; where it was lost, a checkpoint tells.
        """
        return b'"found_at"' in self._status_bytes() or self._holds_checkpoint()

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

        Raises:
            UserError: the folder holds something other than a run, cannot be made, or is in use.
        """
        self._prepare()
        try:
            file = (self.path / _LOCK_NAME).open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"output.dir: {self.path} cannot be written to: {error.strerror}") from error
        with file:
            self._acquire(file)
            yield

    def write_status(
        self,
        state: RunState,
        *,
        exit_code: int | None,
        step: int,
        message: str,
        progress: Mapping[str, float] | None = None,
    ) -> None:
        """Replace ``status.json``; the first call, under the lock, makes this the folder of a run.

        Args:
            exit_code: None while the trainer runs.
            message: one line for a person.
            progress: numbers by name, while the trainer runs.
        """
        places = (
            *(self.checkpoints_folder, self.lora_folder, self.ema_lora_folder, self.best_lora_folder),
            *(self.metrics_file, self.previews_folder),
        )
        found = {place.stem: place.name for place in places if place.exists()}
        status = {"state": state, "exit_code": exit_code, "step": step, "message": message}
        write_json(self.status_file, {**status, **(progress or {}), "found_at": found})

    def read_status(self) -> dict[str, Any] | None:
        """Content of ``status.json``; None before a run has been started, and where only checkpoints tell.

        Raises:
            UserError: the file is not one that ``write_status`` wrote, and there is no checkpoint.
        """
        if not self.holds_run():
            return None
        try:
            status = json.loads(self._status_bytes())
        except ValueError:
            status = None
        if isinstance(status, dict):
            return status
        if self._holds_checkpoint():
            return None
        raise UserError(
            f"{self.status_file} is damaged, and there is no checkpoint to go on from: remove {self.path}, "
            "or use a new folder"
        )

    def is_abandoned(self) -> bool:
        """Whether the trainer that took the lock last is gone, as far as this machine can tell.

        Nothing is locked for that: whoever only looks must not keep a trainer out.
        """
        try:
            holder = re.fullmatch(_LOCK_HOLDER, (self.path / _LOCK_NAME).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            return False
        if holder is None or holder["host"] != socket.gethostname() or sys.platform == "win32":
            return False
        try:
            os.kill(int(holder["process"]), 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False
        return False

    def changes(self) -> object:
        """A value that is another one after anything has changed here that a page of the run shows."""
        found = []
        for entry in self.path.iterdir():
            if entry.name == self.report_file.name or is_unfinished(entry.name):
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:
                continue
            found.append((entry.name, status.st_mtime_ns, status.st_size))
        return sorted(found), self.is_abandoned()

    def _status_bytes(self) -> bytes:
        try:
            return self.status_file.read_bytes()
        except OSError:
            return b""

    def _holds_checkpoint(self) -> bool:
        return any(self.checkpoints_folder.glob(_MANIFESTS))

    def _require_kinds(self) -> None:
        """Check that nothing is in the place of what a run writes: a file for a folder, a dead link."""
        folders = (
            *(self.checkpoints_folder, self.previews_folder, self.samples_folder),
            *(self.lora_folder, self.ema_lora_folder, self.best_lora_folder),
        )
        files = (
            *(self.config_file, self.resolved_file, self.fingerprint_file, self.lineage_file),
            *(self.status_file, self.items_file, self.quarantine_file, *self.row_files),
        )
        wrong = [f"{path} is no folder" for path in folders if os.path.lexists(path) and not path.is_dir()]
        wrong += [f"{path} is no file" for path in files if os.path.lexists(path) and not path.is_file()]
        if wrong:
            raise UserError(f"output.dir: {'; '.join(wrong)}: move aside what is there")

    def _prepare(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"output folder {self.path} is a file: give a new or empty folder")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output folder {self.path} cannot be made: {error.strerror}") from error
        if not self.holds_run() and any(not _is_ours(entry.name) for entry in self.path.iterdir()):
            raise UserError(
                f"output folder {self.path} is not empty and holds no run: give a new or empty folder "
                "(nothing in this one was changed)"
            )
        self._require_kinds()

    def _acquire(self, file: IO[str]) -> None:
        if sys.platform == "win32":
            logger.warning("Folders cannot be locked on Windows: start no second run in %s", self.path)
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"output folder {self.path} is in use by {file.read().strip()}") from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): start no second run there", self.path, error.strerror)
            return
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._remove_unfinished()

    def _remove_unfinished(self) -> None:
        """Remove the files that killed writers left; nobody else writes while the lock is held."""
        for entry in (*self.path.glob("*"), *self.previews_folder.glob("*")):
            if is_unfinished(entry.name) and entry.is_file():
                entry.unlink(missing_ok=True)


def find_runs(places: Sequence[Path]) -> dict[str, Path]:
    """The run folders among some places and directly in them, in this order, each by a name of its own.

    The name is the folder's, with as many of those above it as it takes to tell all runs apart.
    """
    found: dict[Path, Path] = {}
    for place in places:
        inner = [place] if RunFolder(place).holds_run() else sorted(place.glob("*"))
        found |= {folder.resolve(): folder for folder in inner if RunFolder(folder).holds_run()}
    depth = 1
    while len({folder.parts[-depth:] for folder in found}) < len(found):
        depth += 1
    return {"/".join(resolved.parts[-depth:]): folder for resolved, folder in found.items()}


@contextmanager
def outcome_recorded(
    folder: RunFolder, saved_step: Callable[[], int], *, start_step: int, total_steps: int
) -> Iterator[list[str]]:
    """Scope of a run: ``status.json`` says that it is running, and afterwards how it ended.

    Remarks that are put into the list are part of the message of a run that finished.

    A run that turns out to be a different one leaves the status as it was.

    Args:
        saved_step: the step of the newest checkpoint, which the status names when the run ends early.
    """
    before = folder.read_status()
    folder.write_status("running", exit_code=None, step=start_step, message="started")
    remarks: list[str] = []
    try:
        yield remarks
    except DifferentRunError:
        if before is not None:
            write_json(folder.status_file, before)
        raise
    except BaseException as error:
        try:
            message = str(error) or type(error).__name__
            folder.write_status(_state(error), exit_code=exit_code(error), step=saved_step(), message=message)
        except OSError as failure:
            # A full disk takes no status either; the error that ended the run matters more.
            logger.warning("%s could not be written: %s", folder.status_file, failure)
        raise
    message = "; ".join(["finished", *remarks])
    folder.write_status("finished", exit_code=EXIT_FINISHED, step=total_steps, message=message)


def _state(error: BaseException) -> RunState:
    if isinstance(error, RunInterrupted):
        return "interrupted"
    if isinstance(error, RunDivergedError):
        return "diverged"
    return "stopped" if isinstance(error, RunStoppedError) else "failed"


def _is_ours(name: str) -> bool:
    """Whether a name is one that a trainer can have left which ended before its first status."""
    return name in (_LOCK_NAME, _QUARANTINE_NAME) or is_unfinished(name)
