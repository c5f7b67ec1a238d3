"""This file has the doctor examine a data set as seen by a config, and keeps what it found for later looks.

The doctor is a process of its own without a GPU, so that it may work while a run trains. What it prints is
taken over by whoever looks first after its end, also a server that was started since.
"""

import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from diffsynth_lite.data.captions import EXAMPLE_MODEL
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, read_bytes, write_json
from diffsynth_lite.ui.data_sets.captioning import command, over
from diffsynth_lite.ui.jobs import Job, interrupt
from diffsynth_lite.ui.pages import digest
from diffsynth_lite.workspace import Workspace

Marks: TypeAlias = Mapping[str, tuple[str, str]]
"""Version and caption of each item: one that has others now was changed since."""

_REWRITTEN = ("refusal", "boilerplate", "one_word", "other_script", "not_json")
"""Kinds of remarks whose remedy is another caption."""
_LABELS = {
    "dropped": "Cannot be used",
    "equal": "Equal files",
    "alike": "Look alike",
    "same": "Same caption",
    "bars": "Black bars",
    "not_json": "Not JSON",
}
_SHOWN = ("advice", "problems", "remedy", "facts")
_MOST_BYTES = 256 << 20
_LOG_LINES = 5
_OUTPUTS = (".out", ".log")
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}


@dataclass(frozen=True)
class Examination:
    """What the doctor finds in one data set as one config sees it."""

    data_set: str
    config: str
    workspace: Workspace

    def start(self, marks: Marks, *, goal: str, settings: str, prefix: str) -> None:
        """Start the doctor.

        Args:
            goal: of which it knows the usual number of items; empty for none.
            settings: what changes with the config.
            prefix: of the names that it gives to items of this data set.
        """
        for other in map(Job.read, self.workspace.logs_folder.glob("doctor-*.json")):
            if other.is_alive:
                name = other.note.get("data_set")
                raise UserError(f"{name} is being examined; stop that first, or wait until it has ended")
        words = ["doctor", "--config", f"configs/{self.config}.yaml", "--json"]
        words += ["--goal", goal] if goal else []
        note = {"data_set": self.data_set, "prefix": prefix, "settings": settings, "marks": marks}
        self._job.start(words, self.workspace, note=note, outputs=_OUTPUTS, variables=_NO_GPU)

    def stop(self) -> None:
        """End the doctor, and keep what it found before."""
        interrupt(self._job.process)
        self._forget()

    def as_json(self, *, settings: str) -> dict[str, Any]:
        """What is known now: ``state`` is "none", "running", "failed" with its ``log``, or "done"."""
        state, job = "done", self._job
        if job.words:
            state = "running" if job.is_alive else self._take(job)
        found = _read(self._file)
        if found is None:
            state = "none" if state == "done" else state
            found = {}
        else:
            found |= {"age_s": time.time() - found["at"], "is_config_changed": found["settings"] != settings}
        return {**found, "state": state, "log": job.log(_LOG_LINES) if state == "failed" else []}

    def _take(self, job: Job) -> str:
        """Keep what a doctor that has ended printed; the state after that."""
        try:
            found = findings_of(_read(job.with_ending(".out")) or {}, prefix=job.note["prefix"])
            found |= {"at": job.started_at} | {name: job.note[name] for name in ("settings", "marks")}
        except KeyError:  # It failed, or was one of another version.
            return "failed"
        self._file.parent.mkdir(exist_ok=True)
        write_json(self._file, found)
        self._forget()
        return "done"

    def _forget(self) -> None:
        """Remove what it printed; one that has not ended yet keeps files of its own."""
        for ending in (".json", *_OUTPUTS):
            self._job.with_ending(ending).unlink(missing_ok=True)

    @property
    def _job(self) -> Job:
        return Job.read(self.workspace.logs_folder / f"doctor-{self._file.name}")

    @property
    def _file(self) -> Path:
        name = digest(f"{self.data_set}/{self.config}".encode())
        return self.workspace.logs_folder.with_name("examined") / f"{name}.json"


def findings_of(printed: Mapping[str, Any], *, prefix: str) -> dict[str, Any]:
    """What ``doctor --json`` says of the items whose names have a prefix, and of all data together.

    Returns:
        ``items`` by file; ``kinds`` of remarks, each with its ``label`` and ``files``; ``phrases`` that
        most captions have, and what is in ``_SHOWN``.
    """
    of_kind: dict[str, Iterable[str]] = {
        "dropped": printed["dropped"],
        **{name: [file for group in printed[name] for file in group] for name in ("equal", "alike")},
        **printed["sizes"],
        **printed["flaws"],
        **printed["captions"]["remarks"],
    }
    kinds = {
        kind: {"label": _LABELS.get(kind, kind.replace("_", " ").capitalize()), "files": files}
        for kind, names in of_kind.items()
        if (files := list(_without(prefix, names)))
    }
    return {
        "items": {name: printed["items"][prefix + name] for name in _without(prefix, printed["items"])},
        "kinds": kinds,
        "phrases": printed["captions"]["constant"],
        **{name: printed[name] for name in _SHOWN},
    }


def remedies(
    kinds: Mapping[str, Any], folder: Path, latest: Sequence[str], workspace: Workspace
) -> dict[str, str]:
    """The commands that mend what can be mended by one, by kinds of remarks.

    Args:
        latest: arguments by which a model wrote captions there; without any, the model is the suggested one.
    """
    path, commands = workspace.shown(folder), {}
    if "bars" in kinds:
        words = ["diffsynth-lite", "prepare", path, "--out", f"{path}-prepared", "--strip-bars"]
        commands["bars"] = shlex.join(words)
    for kind in _REWRITTEN:
        if kind in kinds:
            written = latest or ("--model", EXAMPLE_MODEL)
            commands[kind] = command(over(written, kinds[kind]["files"], path))
    return commands


def _without(prefix: str, names: Iterable[str]) -> Iterator[str]:
    return (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _read(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        given = parse_json(read_bytes(file, most_bytes=_MOST_BYTES))
    except (OSError, UserError, ValueError):
        return None
    return given if isinstance(given, dict) else None
