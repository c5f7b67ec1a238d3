"""This file keeps one process that generates with a loaded model, and ends it when others need the device."""

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.queue.outcome import log_lines
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.serving import Served
from diffsynth_lite.ui.jobs import Jobs
from diffsynth_lite.workspace import Workspace

IDLE_MINUTES = 15
_COMMAND = (sys.executable, "-m", "diffsynth_lite.cli.main", "sample")
_WATCH_S = 2.0
_RESERVED_BYTES = 1 << 30
"""Of the free memory, for what the libraries take: estimates are without it."""


class Studio:
    """The process of a workspace that generates, of which there is one at most.

    It ends with this program, as its stdin is closed then, and where nothing is asked for long.

    Args:
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
        self._served: Served | None = None
        self._run: Path | None = None
        self._next_to: Sequence[str] = ()
        self._allowed_bytes = 0
        self._request: Mapping[str, Any] | None = None
        self._state: dict[str, Any] = {}

    def generate(self, run: Path, request: Mapping[str, Any]) -> None:
        """Generate, in place of what is generated now; the process is started if need be.

        Next to what uses the device it generates only where the estimated memory is free.

        Args:
            request: the arguments of ``sample`` by their names.
        """
        with self._lock:
            names = tuple(self._holders())
            if self._run != run or set(names) - set(self._next_to):
                self.end()
            served = self._served
            if served is None or not served.is_open:
                self._run, self._next_to, self._allowed_bytes = run, names, 0
                self._state = {"state": "none"}
                served = self._new(request["lora"][0])
            self._ask(served, request, "count" if names else "generate")
            if served is not self._served:
                self._served = served
                threading.Thread(target=self._watch, args=(served,), daemon=True).start()
            self._state = {"state": "working", "phase": "starting"}

    def cancel(self) -> None:
        """End what is generated; the model stays loaded."""
        with self._lock:
            if self._served is not None:
                self._request = None  # nor is it generated where only its memory was counted so far
                self._served.cancel()

    def end(self, reason: str = "") -> None:
        """End the process, if there is one; it is gone when this returns."""
        with self._lock:
            served, self._served = self._served, None
            if served is not None:
                if self._state["state"] == "working":
                    self._state = {"state": "failed", "error": reason} if reason else {"state": "cancelled"}
                served.close()

    def state(self, run: Path) -> dict[str, Any]:
        """How far the latest request of a run is, and whether its model is loaded or being loaded."""
        with self._lock:
            found = self._state if self._run == run else {"state": "none"}
            return {**found, "is_open": self._run == run and bool(self._served and self._served.is_open)}

    def _new(self, lora: str) -> Served:
        command = [*self._command, f"--lora={lora}", "--serve", str(IDLE_MINUTES)]
        served: Served = Served(
            command, self._workspace.path, log=self._log, heard=lambda answer: self._take(served, answer)
        )
        return served

    @property
    def _log(self) -> Path:
        return self._workspace.logs_folder.parent / "try.log"

    def _ask(self, served: Served, request: Mapping[str, Any], ask: Literal["generate", "count"]) -> None:
        self._request = request
        served.ask(**request, ask=ask, cancels=True)

    def _take(self, served: Served, answer: dict[str, Any]) -> None:
        """Take an answer to the newest request, or the end of the process before it had one."""
        with self._lock:
            state = answer["state"]
            if self._served is not served or state == "ready":
                return
            if state == "working":
                self._state |= {name: answer[name] for name in ("phase", "done", "total", "ticks")}
            elif state == "counted" and self._request is not None:
                self._judge(served, self._request, answer)
            elif state == "done":
                self._state = {"state": "done", "number": Path(answer["grid"]).parent.name}
            elif state == "failed":
                last = " ".join(["The process ended.", *log_lines(self._log, num_lines=1)])
                self._state = {"state": "failed", "error": last if "exit_code" in answer else answer["error"]}
            else:
                self._state = {"state": "cancelled"}

    def _judge(self, served: Served, request: Mapping[str, Any], counted: dict[str, Any]) -> None:
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
        self._ask(served, request, "generate")

    def _watch(self, served: Served) -> None:
        """End a process when something begins to use the device, such as a run of a queue or a terminal."""
        while True:
            time.sleep(self._watch_s)
            # One that has ended stays: how it ended may not be taken in yet.
            names = self._holders() if served.is_open else ()
            with self._lock:
                if self._served is not served:
                    return
                if others := set(names) - set(self._next_to):
                    self.end(f"{', '.join(sorted(others))} began to use the device.")


def device_holders(workspace: Workspace) -> list[str]:
    """Names of the runs that train on this machine, and what else uses its device."""
    runs = [name for name, folder in workspace.runs.items() if RunFolder(folder).trains_here()]
    return [*runs, *Jobs(workspace).holders()]
