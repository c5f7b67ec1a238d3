"""Requests and answers in lines of JSON, and the process that is asked."""

import io
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffsynth_lite.serving import Requests, Served

ECHO = """
from diffsynth_lite.serving import Requests, standard_lines
with standard_lines() as (lines, answers):
    requests = Requests(lines, answers, idle_s=60)
    for request in requests:
        print("what a library prints")
        if request.get("ends"):
            raise SystemExit(3)
        requests.answer(request, "part", echo=request["text"])
        requests.answer(request, "done")
"""


def states(answers: io.StringIO) -> list[tuple[Any, str]]:
    found = [json.loads(line) for line in answers.getvalue().splitlines()]
    return [(one["id"], one["state"]) for one in found]


def test_the_newest_request_wins_and_the_last_is_answered_though_no_more_come() -> None:
    has_first, answers = threading.Event(), io.StringIO()

    def lines() -> Iterator[bytes]:
        yield b'{"id": 1}\n'
        has_first.wait()
        yield b'{"id": 2}\n'
        yield b"not json\n"
        yield b"[3]\n"
        yield b'{"id": 4}\n'

    requests = Requests(lines(), answers, idle_s=60)
    order = []
    for request in requests:
        order.append(request["id"])
        if request["id"] == 1:
            assert not requests.is_outdated
            has_first.set()
            while (2, "dropped") not in states(answers):
                time.sleep(0.001)
            assert requests.is_outdated
        requests.answer(request, "done")
    assert order == [1, 4]
    assert sorted(map(str, states(answers))) == sorted(
        map(str, [(None, "failed"), (None, "failed"), (2, "dropped"), (1, "done"), (4, "done")])
    )


def test_requests_end_where_none_comes_for_long() -> None:
    never = threading.Event()

    def lines() -> Iterator[bytes]:
        never.wait(60)
        yield b""

    assert list(Requests(lines(), io.StringIO(), idle_s=0.01)) == []
    never.set()


def answered(served: Served, name: int) -> list[dict[str, Any]]:
    while not (found := served.answers(name)) or found[-1]["state"] not in ("done", "failed"):
        time.sleep(0.005)
    return found


def test_a_program_is_asked_started_again_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    served = Served([sys.executable, "-c", ECHO], tmp_path)
    first = served.ask(text="ä")
    assert answered(served, first) == [
        {"id": first, "state": "part", "echo": "ä"},
        {"id": first, "state": "done"},
    ]
    ended = served.ask(ends=True)
    assert served.answers(first) == []
    (failed,) = answered(served, ended)
    assert failed["state"] == "failed"
    assert "exit code 3" in failed["error"]
    again = served.ask(text="b")
    assert [one["state"] for one in answered(served, again)] == ["part", "done"]
    process = served._process
    assert process is not None
    served.close()
    assert process.wait(60) == 0
