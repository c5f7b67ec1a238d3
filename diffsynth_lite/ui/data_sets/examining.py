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
from diffsynth_lite.queue.outcome import log_lines
from diffsynth_lite.ui.data_sets.captioning import command, over, shown_path
from diffsynth_lite.ui.jobs import interrupt, lives_here, start_command
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
        for busy in self._folder.glob("*.started.json"):
            if (known := _read(busy)) and lives_here(known["process"]):
                name = known["data_set"]
                raise UserError(f"{name} is being examined; stop that first, or wait until it has ended")
        self._folder.mkdir(exist_ok=True)
        words = ["doctor", "--config", f"configs/{self.config}.yaml", "--json"]
        words += ["--goal", goal] if goal else []
        facts = {"data_set": self.data_set, "prefix": prefix, "settings": settings, "marks": marks}
        self._drop_started()  # One that a killed server has started, and not noted, keeps files of its own.
        with self._file("out").open("wb") as out, self._file("log").open("wb") as log:
            start_command(
                words,
                self.workspace,
                out,
                noted_in=self._file("started.json"),
                facts={**facts, "at": time.time()},
                errors=log,
                variables=_NO_GPU,
            )

    def stop(self) -> None:
        """End the doctor, and keep what it found before."""
        if (started := _read(self._file("started.json"))) is not None:
            interrupt(started["process"])
            self._drop_started()

    def as_json(self, *, settings: str) -> dict[str, Any]:
        """What is known now: ``state`` is "none", "running", "failed" with its ``log``, or "done"."""
        state, started = "done", _read(self._file("started.json"))
        if started is not None:
            state = "running" if lives_here(started["process"]) else self._take(started)
        found = _read(self._file("json"))
        if found is None:
            state = "none" if state == "done" else state
            found = {}
        else:
            found |= {"age_s": time.time() - found["at"], "is_config_changed": found["settings"] != settings}
        log = log_lines(self._file("log"), num_lines=_LOG_LINES) if state == "failed" else []
        return {**found, "state": state, "log": log}

    def _take(self, started: Mapping[str, Any]) -> str:
        """Keep what a doctor that has ended printed; the state after that."""
        try:
            found = findings_of(_read(self._file("out")) or {}, prefix=started["prefix"])
        except KeyError:  # It failed, or was one of another version.
            return "failed"
        write_json(self._file("json"), found | {name: started[name] for name in ("at", "settings", "marks")})
        self._drop_started()
        return "done"

    def _drop_started(self) -> None:
        for kind in ("started.json", "out", "log"):
            self._file(kind).unlink(missing_ok=True)

    @property
    def _folder(self) -> Path:
        return self.workspace.logs_folder.with_name("examined")

    def _file(self, kind: str) -> Path:
        return self._folder / f"{digest(f'{self.data_set}/{self.config}'.encode())}.{kind}"


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
    path, commands = shown_path(folder, workspace), {}
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
