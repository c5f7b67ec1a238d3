"""This file serves a program to another one, in lines of JSON: requests come in, answers go out.

The newest request wins: one waits at most, and a newer one takes its place.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TextIO, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.files import parse_json
from diffsynth_lite.redaction import redacted

_Kind = TypeVar("_Kind", bound="Request")

_LAST = ("done", "counted", "failed", "cancelled", "dropped")
"""States after which a request has no more answers."""
_END_S = 3.0
"""Time for a program to end by itself."""


class Request(BaseModel):
    """A line that came in; arguments that are not of its kind are refused.

    Attributes:
        id: that its answers have.
        cancels: whether it ends what is answered, and does not wait for that.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    id: int | str | None = None
    cancels: bool = True


class Requests(Generic[_Kind]):
    """The requests of another program, to iterate over: the newest, once the one before is answered.

    They end when no line comes any more, or none has come for long. ``{"ask": "cancel"}`` ends what is
    answered and drops what waits; ``{"ask": "end"}`` ends the requests, too.

    Args:
        lines: each a JSON object; read in a thread of its own.
        idle_s: seconds without a request after which they end.
    """

    def __init__(self, kind: type[_Kind], lines: Iterable[bytes], answers: TextIO, *, idle_s: float) -> None:
        self._kind, self._answers, self._idle_s = kind, answers, idle_s
        self._changed, self._writing = threading.Condition(), threading.Lock()
        self._waiting: _Kind | None = None
        self._is_closed = self._is_outdated = False
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()

    def __iter__(self) -> Iterator[_Kind]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed, self._idle_s)
                taken, self._waiting = self._waiting, None
                self._is_outdated = False
            if taken is None:
                return
            yield taken

    def require_wanted(self) -> None:
        """Go on only if nothing came that ends what is answered now.

        Raises:
            RunInterrupted: it is no longer wanted.
        """
        with self._changed:
            if self._is_outdated:
                raise RunInterrupted("no longer wanted")

    @contextmanager
    def answering(self, request: _Kind, *, outdated: str) -> Iterator[None]:
        """Scope in which a request is answered.

        Args:
            outdated: its state where :meth:`require_wanted` ends that.
        """
        try:
            yield
        except RunInterrupted:
            self.answer(request, outdated)
        except (UserError, RunStoppedError) as error:
            self.fail(request, error)

    def answer(self, request: _Kind | None, state: str, **more: object) -> None:
        """Write an answer, or a part of one; None is none of a request."""
        self._write(request and request.id, state, more)

    def fail(self, request: _Kind | None, error: Exception) -> None:
        """Answer with an error, in one line."""
        self.answer(request, "failed", error=redacted("; ".join(str(error).splitlines())))

    def _write(self, name: object, state: str, more: Mapping[str, object]) -> None:
        line = json.dumps({"id": name, "state": state} | dict(more), default=str, ensure_ascii=False)
        with self._writing, suppress(BrokenPipeError):
            self._answers.write(f"{line}\n")
            self._answers.flush()

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            given: Any = None
            try:
                given = parse_json(line)
                ask = given.get("ask") if isinstance(given, dict) else None
                self._take(None if ask in ("cancel", "end") else self._kind.model_validate(given))
            except ValueError as error:
                name = given.get("id") if isinstance(given, dict) else None
                self._write(name, "failed", {"error": f"not a request: {_reason(error)}"})
            else:
                if ask == "end":
                    break
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _take(self, request: _Kind | None) -> None:
        with self._changed:
            dropped, self._waiting = self._waiting, request
            self._is_outdated |= request is None or request.cancels
            self._changed.notify()
        if dropped is not None:
            self.answer(dropped, "dropped")


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


@contextmanager
def standard_lines() -> Iterator[tuple[BinaryIO, TextIO]]:
    """Scope in which standard input is read for requests, and answers are all that standard output has."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    try:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
        # Without a buffer, whose lock the thread that reads would hold at the end of the program.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
            yield lines, answers
    finally:
        with suppress(BrokenPipeError):  # of an answer that nobody has read
            answers.close()


class Served:
    """A program that serves :class:`Requests`, started when it is first asked, and again where it has ended.

    Ctrl+C in the terminal of this program is not for it: it ends as this one does.

    Args:
        command: that starts it, with its arguments.
        folder: where it runs; no modules are taken from there.
        log: new file for what it says besides answers; None is with what this program says.
        heard: takes each answer to what was asked last, in another thread.
        variables: of its environment, in addition to those of this process.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        *,
        log: Path | None = None,
        heard: Callable[[dict[str, Any]], None] = lambda answer: None,
        variables: Mapping[str, str] = {},
    ) -> None:
        self._command, self._folder, self._log, self._heard = command, folder, log, heard
        self._variables = variables
        self._lock, self._last_id = threading.Lock(), 0
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: list[dict[str, Any]] = []

    def ask(self, **request: object) -> int:
        """Ask, in place of what was asked before; returns the name of the request's answers.

        Raises:
            UserError: the program cannot be started.
        """
        with self._lock:
            self._last_id += 1
            self._answers = []
            for _ in range(2):  # it may end, as nothing was asked for long, while it is written to
                if self._process is None or self._process.poll() is not None:
                    self._process = self._started()
                if self._write(self._process, {"id": self._last_id} | request):
                    break
                self._process.wait()
            return self._last_id

    def cancel(self) -> None:
        """End what is answered, which then says so; the program stays."""
        with self._lock:
            if self._process is not None:
                self._write(self._process, {"ask": "cancel"})

    @property
    def is_open(self) -> bool:
        """Whether the program runs."""
        with self._lock:
            return self._process is not None and self._process.poll() is None

    def answers(self, name: int) -> list[dict[str, Any]]:
        """What has been answered so far; none where something newer was asked.

        Of how far it is ("working") only the newest is kept. The last one is "failed" where the program ended
        before it had answered.
        """
        with self._lock:
            return list(self._answers) if name == self._last_id else []

    def close(self) -> None:
        """End the program: it sees that nobody asks any more. It is gone when this returns."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _started(self) -> "subprocess.Popen[bytes]":
        with ExitStack() as files:
            try:
                process = subprocess.Popen(
                    self._command,
                    cwd=self._folder,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=files.enter_context(self._log.open("wb")) if self._log else None,
                    env={**os.environ, "PYTHONSAFEPATH": "1", **self._variables},
                    start_new_session=True,
                )
            except OSError as error:
                raise UserError(f"{self._command[0]} cannot be started: {error.strerror}") from None
        threading.Thread(target=self._collect, args=(process,), daemon=True).start()
        return process

    def _write(self, process: "subprocess.Popen[bytes]", request: Mapping[str, object]) -> bool:
        """Write to the program; returns whether it was there to read."""
        assert process.stdin is not None
        with suppress(OSError, ValueError):  # its stdin is closed once it has closed its stdout
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            return True
        return False

    def _collect(self, process: "subprocess.Popen[bytes]") -> None:
        # Waits for it, and closes its pipes: one may hold what it did not read.
        with suppress(OSError), process:
            for line in process.stdout or ():
                with suppress(ValueError, KeyError, TypeError):  # what a library printed is not an answer
                    self._take(process, parse_json(line))
        code = process.returncode
        error = f"{self._command[0]} ended with exit code {code}"
        self._take(process, {"id": None, "state": "failed", "error": error, "exit_code": code})

    def _take(self, process: "subprocess.Popen[bytes]", answer: dict[str, Any]) -> None:
        """Keep an answer; one without a name is about the program, and so to what was asked last."""
        name, state = answer["id"], answer["state"]
        with self._lock:
            is_past = name not in (None, self._last_id) or self._process not in (process, None)
            last = self._answers[-1]["state"] if self._answers else ""
            if is_past or last in _LAST:
                return
            if last == state == "working":
                self._answers.pop()
            self._answers.append(answer | {"id": self._last_id})
        self._heard(answer)
