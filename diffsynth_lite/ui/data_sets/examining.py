"""This file has the doctor examine a data set as seen by a config, and keeps what it found for later looks.

The doctor is a process of its own without a GPU, so that it may work while a run trains. What it prints is
taken over by whoever looks first after its end, also a server that was started since.
"""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, read_bytes, write_json
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.process import Process
from diffsynth_lite.ui.data_sets.captioning import DEFAULT_MODEL, command, over, shown_path
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
_LOG_LINES, _LOG_BYTES = 5, 64 << 10
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ZE_AFFINITY_MASK": ""}


@dataclass(frozen=True)
class Examination:
    """What the doctor finds in one data set as one config sees it.

    Args:
        data_set: its name in the workspace.
        config: name of the config.
    """

    data_set: str
    config: str
    workspace: Workspace

    def start(self, marks: Marks, *, goal: str, settings: str, prefix: str) -> None:
        """Start the doctor.

        Args:
            goal: of which it knows the usual number of items; empty for none.
            settings: what changes with the config.
            prefix: of the names that it gives to items of this data set.

        Raises:
            UserError: it examines one already, or cannot be started.
        """
        for busy in self._folder.glob("*.started.json"):
            if (known := _read(busy)) and _is_alive(known):
                name = known["data_set"]
                raise UserError(f"{name} is being examined; stop that first, or wait until it has ended")
        self._folder.mkdir(exist_ok=True)
        words = ["doctor", "--config", f"configs/{self.config}.yaml", "--json"]
        words += ["--goal", goal] if goal else []
        with self._file("out").open("wb") as out, self._file("log").open("wb") as log:
            process = _spawn(words, self.workspace.path, out.fileno(), log.fileno())
        started = {"data_set": self.data_set, "process": process.as_text(), "prefix": prefix}
        kept = {"at": time.time(), "settings": settings, "marks": marks}
        write_json(self._file("started.json"), started | kept)

    def stop(self) -> None:
        """End the doctor, and keep what it found before."""
        if (started := _read(self._file("started.json"))) is not None:
            if _is_alive(started) and (process := Process.from_text(started["process"])) is not None:
                process.interrupt()
            self._drop_started()

    def as_json(self, *, settings: str) -> dict[str, Any]:
        """What is known now: ``state`` is "none", "running", "failed" with its ``log``, or "done".

        Args:
            settings: as at ``start``.
        """
        state, started = "done", _read(self._file("started.json"))
        if started is not None:
            state = "running" if _is_alive(started) else self._take(started)
        found = _read(self._file("json"))
        if found is None:
            state = "none" if state == "done" else state
            found = {}
        else:
            found |= {"age_s": time.time() - found["at"], "is_config_changed": found["settings"] != settings}
        return {**found, "state": state, "log": self._log() if state == "failed" else []}

    def _take(self, started: Mapping[str, Any]) -> str:
        """Keep what a doctor that has ended printed; the state after that."""
        printed = _read(self._file("out"))
        if printed is None:
            return "failed"
        kept = {name: started[name] for name in ("at", "settings", "marks")}
        write_json(self._file("json"), kept | findings_of(printed, prefix=started["prefix"]))
        self._drop_started()
        return "done"

    def _drop_started(self) -> None:
        for kind in ("started.json", "out", "log"):
            self._file(kind).unlink(missing_ok=True)

    def _log(self) -> list[str]:
        text = read_bytes(self._file("log"), most_bytes=_LOG_BYTES).decode(errors="replace")
        return [redacted(line) for line in text.splitlines() if line.strip()][-_LOG_LINES:]

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
        kinds: those of :func:`findings_of`.
        latest: arguments by which a model wrote captions there; without any, the model is the suggested one.
    """
    path, commands = shown_path(folder, workspace), {}
    if "bars" in kinds:
        words = ["diffsynth-lite", "prepare", path, "--out", f"{path}-prepared", "--strip-bars"]
        commands["bars"] = shlex.join(words)
    for kind in _REWRITTEN:
        if kind in kinds:
            written = latest or ("--model", DEFAULT_MODEL)
            commands[kind] = command(over(written, kinds[kind]["files"], path))
    return commands


def _without(prefix: str, names: Iterable[str]) -> Iterator[str]:
    return (name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _is_alive(started: Mapping[str, Any]) -> bool:
    process = Process.from_text(started["process"])
    return process is not None and process.is_here() and process.is_alive()


def _spawn(command: list[str], folder: Path, out: int, log: int) -> Process:
    """Start the doctor in a session of its own, so that it outlives this process.

    Raises:
        UserError: the system refuses.
    """
    detached: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        detached = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "diffsynth_lite.cli.main", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            env={**os.environ, **_NO_GPU, "PYTHONSAFEPATH": "1"},
            **detached,
        )
    except OSError as error:
        raise UserError(f"doctor cannot be started in {folder}: {error.strerror}") from None
    threading.Thread(target=child.wait, daemon=True).start()
    return Process.of(child.pid)


def _read(file: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        given = parse_json(read_bytes(file, most_bytes=_MOST_BYTES))
    except (OSError, UserError, ValueError):
        return None
    return given if isinstance(given, dict) else None
