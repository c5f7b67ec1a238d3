"""This file serves one session to another program, in lines of JSON: requests come in, answers go out.

A request has the arguments of ``diffsynth-lite sample`` by their names, such as ``{"id": 1, "prompt": ["a
red star"], "scale": [0, 1]}``, and one waits at most: a newer one takes its place.
"""

import json
import threading
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from pydantic import ValidationError

from diffsynth_lite.config import Config
from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.progress_log import watched
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.sampling.request import SampleArguments, SampleRequest
from diffsynth_lite.sampling.session import SampleSession
from diffsynth_lite.training.planning.phases import Phase

_State = Literal["ready", "working", "done", "counted", "cancelled", "dropped", "failed"]


class _Asked(SampleArguments):
    """A line that came in.

    Attributes:
        id: that its answers have.
        ask: "count" for the memory that "generate" would take; "cancel" ends what is generated and drops what
            waits.
        cancels: whether it ends what is generated, and does not wait for that.
    """

    id: int | str | None = None
    ask: Literal["generate", "count", "cancel", "end"] = "generate"
    cancels: bool = False


class SampleServer:
    """Answers one request after the other.

    Args:
        request_of: makes a request of its arguments.
        answers: takes a line for each answer: ``id``, ``state`` and what belongs to that.
        idle_s: seconds without a request after which it ends.
        kept: folder of the counts of earlier plans; None is none.
    """

    def __init__(
        self,
        request_of: Callable[[dict[str, Any]], SampleRequest],
        answers: TextIO,
        *,
        idle_s: float,
        kept: Path | None = None,
    ) -> None:
        self._request_of, self._answers, self._idle_s, self._kept = request_of, answers, idle_s, kept
        self._changed, self._writing = threading.Condition(), threading.Lock()
        self._waiting: _Asked | None = None
        self._is_cancelled = self._ends = False

    def serve(self, config: Config, run: RunFolder | None, lines: Iterable[bytes]) -> None:
        """Answer requests until one asks for the end, none comes any more, or none has come for long.

        Args:
            config: of the session, as is ``run``.
            lines: read in a thread of their own, which ends with them or with the program.
        """
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        try:
            opened = SampleSession.open(config, run)
        except UserError as error:
            self._answer(None, "failed", error=_in_one_line(error))
            raise
        with closing(opened) as session:
            self._answer(None, "ready")
            while (asked := self._next()) is not None:
                self._work(session, asked)

    def _read(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            given: Any = None
            try:
                given = json.loads(line)
                self._take(_Asked.model_validate(given))
            except ValueError as error:
                name = given.get("id") if isinstance(given, dict) else None
                self._answer(name, "failed", error=f"not a request: {_reason(error)}")
        self._take(_Asked(ask="end"))

    def _take(self, asked: _Asked) -> None:
        with self._changed:
            dropped, self._waiting = self._waiting, asked
            if asked.ask in ("cancel", "end"):
                self._waiting = None
            self._ends |= asked.ask == "end"
            self._is_cancelled |= asked.cancels or asked.ask in ("cancel", "end")
            self._changed.notify()
        if dropped is not None:
            self._answer(dropped.id, "dropped")

    def _next(self) -> _Asked | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends, timeout=self._idle_s)
            taken, self._waiting = self._waiting, None
            self._is_cancelled = False
            return None if self._ends else taken

    def _work(self, session: SampleSession, asked: _Asked) -> None:
        last, ticks = None, 0

        def watch(phase: str, done: int, total: int) -> None:
            nonlocal last, ticks
            if self._is_cancelled:
                raise RunInterrupted("cancelled")
            ticks = ticks + 1 if last == (phase, done) else 0
            last = phase, done
            self._answer(asked.id, "working", phase=phase, done=done, total=total, ticks=ticks)

        try:
            given = asked.model_dump(include=set(SampleArguments.model_fields), exclude_none=True)
            request = self._request_of(given)
            with watched(watch):
                if asked.ask == "count":
                    needs = session.count_bytes(request, self._kept)
                    self._answer(asked.id, "counted", **_counted(needs, session.device))
                else:
                    self._answer(asked.id, "done", **asdict(session.generate(request)))
        except (UserError, RunStoppedError) as error:
            self._answer(asked.id, "failed", error=_in_one_line(error))
        except RunInterrupted:
            self._answer(asked.id, "cancelled")

    def _answer(self, name: object, state: _State, **more: object) -> None:
        line = json.dumps({"id": name, "state": state} | more, default=str, ensure_ascii=False)
        with self._writing:
            self._answers.write(f"{line}\n")
            self._answers.flush()


def _in_one_line(error: Exception) -> str:
    return redacted("; ".join(str(error).splitlines()))


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _counted(needs: Phase, device: torch.device) -> dict[str, int | None]:
    return {
        "device_bytes": needs.device,
        "least_device_bytes": needs.least_device,
        "host_bytes": needs.host,
        "free_device_bytes": torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
    }
