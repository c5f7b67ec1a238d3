"""This file serves a program to another one, in lines of JSON: requests come in, answers go out.

The newest request wins: one waits at most, and a newer one takes its place.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from diffsynth_lite.files import parse_json

_LAST = ("done", "failed", "dropped")
"""States after which a request has no more answers."""


class Requests:
    """The requests of another program, to iterate over: the newest, once the one before is answered.

    They end when no line comes any more, or none has come for long.

    Args:
        lines: each a JSON object, with an ``id`` that its answers have; read in a thread of its own.
        answers: takes a line for each answer.
        idle_s: seconds without a request after which they end.
    """

    def __init__(self, lines: Iterable[bytes], answers: TextIO, *, idle_s: float) -> None:
        self._answers, self._idle_s = answers, idle_s
        self._changed, self._writing = threading.Condition(), threading.Lock()
        self._waiting: dict[str, Any] | None = None
        self._is_closed = False
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed, self._idle_s)
                taken, self._waiting = self._waiting, None
            if taken is None:
                return
            yield taken

    @property
    def is_outdated(self) -> bool:
        """Whether the request that is answered now is no longer the newest."""
        with self._changed:
            return self._waiting is not None

    def answer(self, request: dict[str, Any], state: str, **more: object) -> None:
        """Write an answer, or a part of one."""
        line = json.dumps({"id": request.get("id"), "state": state} | more, default=str, ensure_ascii=False)
        with self._writing, suppress(BrokenPipeError):
            self._answers.write(f"{line}\n")
            self._answers.flush()

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            try:
                request = parse_json(line)
                if not isinstance(request, dict):
                    raise ValueError("not a JSON object")
            except ValueError as error:
                self.answer({}, "failed", error=f"request: {error}")
                continue
            with self._changed:
                dropped, self._waiting = self._waiting, request
                self._changed.notify()
            if dropped is not None:
                self.answer(dropped, "dropped")
        with self._changed:
            self._is_closed = True
            self._changed.notify()


@contextmanager
def standard_lines() -> Iterator[tuple[BinaryIO, TextIO]]:
    """Scope in which standard input is read for requests, and answers are all that standard output has."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
        # Without a buffer, whose lock the thread that reads would hold at the end of the program.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
            yield lines, answers


class Served:
    """A program that serves :class:`Requests`, started when it is first asked, and again where it has ended.

    Args:
        command: that starts it, with its arguments.
        folder: where it runs.
    """

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = command, folder
        self._lock, self._last_id = threading.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: dict[int, list[dict[str, Any]]] = {}

    def ask(self, **request: object) -> int:
        """Ask, in place of what was asked before; returns the name of the request's answers."""
        with self._lock:
            self._last_id += 1
            self._answers = {self._last_id: []}
            line = json.dumps({"id": self._last_id} | request).encode() + b"\n"
            for _ in range(2):  # it may end, as nothing was asked for long, while it is written to
                if self._process is None or self._process.poll() is not None:
                    self._process = self._started()
                assert self._process.stdin is not None
                with suppress(OSError):
                    self._process.stdin.write(line)
                    self._process.stdin.flush()
                    break
                self._process.wait()
            return self._last_id

    def answers(self, name: int) -> list[dict[str, Any]]:
        """What has been answered so far; none where something newer was asked.

        The last one is "failed" where the program ended before it had answered.
        """
        with self._lock:
            return list(self._answers.get(name, ()))

    def close(self) -> None:
        """End the program: it sees that nobody asks any more."""
        with self._lock:
            if self._process and self._process.stdin:
                with suppress(OSError):
                    self._process.stdin.close()

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._command, cwd=self._folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        threading.Thread(target=self._collect, args=(process,), daemon=True).start()
        return process

    def _collect(self, process: subprocess.Popen[bytes]) -> None:
        with process:  # waits for it, and closes its pipes
            for line in process.stdout or ():
                self._take(line)
        error = f"{self._command[0]} ended with exit code {process.returncode}"
        with self._lock:
            for name, found in self._answers.items() if process is self._process else ():
                if not found or found[-1]["state"] not in _LAST:
                    found.append({"id": name, "state": "failed", "error": error})

    def _take(self, line: bytes) -> None:
        with suppress(ValueError, KeyError, TypeError):  # what a library printed is not an answer
            answer = parse_json(line)
            with self._lock:
                # Of what was asked before nobody wants to know.
                self._answers.get(answer["id"], []).append(answer)
