"""This file keeps one process that generates with a loaded model, and ends it when others need the device."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.queue.outcome import log_lines
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.ui.jobs import captions_in
from diffsynth_lite.workspace import Workspace

IDLE_MINUTES = 15
_COMMAND = (sys.executable, "-m", "diffsynth_lite.cli.main", "sample")
_END_S = 3.0
"""Time for the process to end by itself."""
_WATCH_S = 2.0
_RESERVED_BYTES = 1 << 30
"""Of the free memory, for what the libraries take: estimates are without it."""


class Studio:
    """The process of a workspace that generates, of which there is one at most.

    It ends with this program, as its stdin is closed then, and where nothing is asked for long.

    Args:
        workspace: its working folder.
        holders: returns the names of what uses the device of this machine now.
        command: that serves requests.
        watch_s: between two looks at what uses the device, while there is a process.
    """

    def __init__(
        self,
        workspace: Workspace,
        holders: Callable[[], Sequence[str]],
        *,
        command: Sequence[str] = _COMMAND,
        watch_s: float = _WATCH_S,
    ) -> None:
        self._workspace, self._holders, self._command = workspace, holders, command
        self._watch_s = watch_s
        self._lock = threading.RLock()
        self._process: subprocess.Popen[str] | None = None
        self._run: Path | None = None
        self._next_to: Sequence[str] = ()
        self._allowed_bytes = 0
        self._number = 0
        self._request: Mapping[str, Any] = {}
        self._state: dict[str, Any] = {}

    def generate(self, run: Path, request: Mapping[str, Any]) -> None:
        """Generate, in place of what is generated now; the process is started if need be.

        Next to what uses the device it generates only where the estimated memory is free.

        Args:
            run: folder whose base model is loaded.
            request: the arguments of ``sample`` by their names.

        Raises:
            UserError: the process cannot be started.
        """
        with self._lock:
            names = tuple(self._holders())
            if self._run != run or set(names) - set(self._next_to):
                self.end()
            if self._process is None:
                self._start(run, request["lora"][0], names)
            self._number += 1
            self._request = request
            self._state = {"state": "working", "phase": "starting"}
            self._send("count" if names else "generate")

    def cancel(self) -> None:
        """End what is generated; the model stays loaded."""
        with self._lock:
            if self._process is not None:
                self._send("cancel")

    def end(self, reason: str = "") -> None:
        """End the process, if there is one; it is gone when this returns."""
        with self._lock:
            process, self._process = self._process, None
            if process is None:
                return
            if self._state["state"] == "working":
                self._state = {"state": "failed", "error": reason} if reason else {"state": "cancelled"}
            assert process.stdin is not None
            with suppress(OSError), process.stdin as stdin:
                stdin.write('{"ask": "end"}\n')
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def state(self, run: Path) -> dict[str, Any]:
        """How far the latest request of a run is, and whether its model is loaded or being loaded."""
        with self._lock:
            found = self._state if self._run == run else {"state": "none"}
            return {**found, "is_open": self._run == run and self._process is not None}

    def _start(self, run: Path, lora: str, names: Sequence[str]) -> None:
        try:
            with self._log.open("wb") as log:
                process = subprocess.Popen(
                    [*self._command, f"--lora={lora}", "--serve", str(IDLE_MINUTES)],
                    cwd=self._workspace.path,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    encoding="utf-8",
                    errors="replace",
                    bufsize=1,
                    # The folder may be somebody else's: no modules are taken from there.
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                    start_new_session=True,  # Ctrl+C in the server's terminal is not for it.
                )
        except OSError as error:
            raise UserError(f"sample cannot be started: {error.strerror}") from None
        self._process, self._run, self._next_to, self._allowed_bytes = process, run, names, 0
        gone = threading.Event()
        for work in (self._read, self._watch):
            threading.Thread(target=work, args=(process, gone), daemon=True).start()

    @property
    def _log(self) -> Path:
        return self._workspace.logs_folder.parent / "try.log"

    def _send(self, ask: Literal["generate", "count", "cancel"]) -> None:
        asked = {} if ask == "cancel" else self._request
        line = json.dumps({"id": self._number, **asked, "ask": ask, "cancels": True})
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):  # It has just ended, which its reader notes.
            self._process.stdin.write(f"{line}\n")

    def _read(self, process: "subprocess.Popen[str]", gone: threading.Event) -> None:
        """Take the answers of a process until it ends."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._take(process, json.loads(line))
        process.wait()
        gone.set()
        assert process.stdin is not None
        with suppress(OSError):  # of what it has not read
            process.stdin.close()
        with self._lock:
            if self._process is not process:
                return
            self._process = None
            if self._state["state"] == "working":
                last = " ".join(log_lines(self._log, num_lines=1))
                self._state = {"state": "failed", "error": f"The process ended. {last}".strip()}

    def _take(self, process: "subprocess.Popen[str]", answer: dict[str, Any]) -> None:
        with self._lock:
            if self._process is process:
                self._note(answer)

    def _note(self, answer: dict[str, Any]) -> None:
        state = answer["state"]
        if answer["id"] not in (None, self._number) or state == "ready":
            return
        if state == "working":
            self._state |= {name: answer[name] for name in ("phase", "done", "total", "ticks")}
        elif state == "counted":
            self._judge(answer)
        elif state == "done":
            self._state = {"state": "done", "number": Path(answer["grid"]).parent.name}
        elif state == "failed":
            self._state = {"state": "failed", "error": answer["error"]}
        else:
            self._state = {"state": "cancelled"}

    def _judge(self, counted: dict[str, Any]) -> None:
        """Generate next to what uses the device, if there is room for both."""
        needed, free = counted["device_bytes"] + _RESERVED_BYTES, counted["free_device_bytes"]
        names = ", ".join(self._next_to)
        if free is None:
            self._state["remark"] = f"{names} uses this processor, too: both are slower meanwhile."
        elif needed > max(free, self._allowed_bytes):
            self.end()
            room = f"this takes about {format_bytes(needed)}, and {format_bytes(free)} are free"
            self._state = {
                "state": "failed",
                "error": f"{names} uses the device: {room}.",
                "sample": [name for name in self._next_to if name in self._workspace.runs],
            }
            return
        # What it has loaded is not free any more.
        self._allowed_bytes = max(needed, self._allowed_bytes)
        self._send("generate")

    def _watch(self, process: "subprocess.Popen[str]", gone: threading.Event) -> None:
        """End a process when something begins to use the device, such as a run of a queue or a terminal."""
        while not gone.wait(self._watch_s):
            names = self._holders()
            with self._lock:
                if self._process is process and (others := set(names) - set(self._next_to)):
                    self.end(f"{', '.join(sorted(others))} began to use the device.")


def device_holders(workspace: Workspace) -> list[str]:
    """Names of the runs that train on this machine, and of the data sets that a model on it writes for."""
    runs = [name for name, folder in workspace.runs.items() if RunFolder(folder).trains_here()]
    statuses = {name: captions_in(folder) for name, folder in workspace.data_sets.items()}
    by_model = [name for name, status in statuses.items() if status and not _is_by_server(status.arguments)]
    return [*runs, *(f"captions of {name}" for name in by_model)]


def _is_by_server(arguments: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == "--endpoint" for word in arguments)
