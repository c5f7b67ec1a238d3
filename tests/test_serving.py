"""Requests and answers in lines of JSON, and the process that is asked."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffsynth_lite import serving
from diffsynth_lite.errors import RunInterrupted, UserError
from diffsynth_lite.serving import Request, Requests, Served

ECHO = """
import sys
import time
from diffsynth_lite.serving import Request, Requests, standard_lines
class Asked(Request):
    text: str = ""
    ends: bool = False
    works: bool = False
with standard_lines() as (lines, answers):
    requests = Requests(Asked, lines, answers, idle_s=60)
    for request in requests:
        print("what a library prints")
        if request.ends:
            raise SystemExit(3)
        with requests.answering(request, outdated="cancelled"):
            while request.works:
                requests.answer(request, "working", done=1)
                requests.require_wanted()
                time.sleep(0.002)
            requests.answer(request, "part", echo=request.text)
            requests.answer(request, "done")
"""


ENDS = ("done", "failed", "cancelled")


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

    requests = Requests(Request, lines(), answers, idle_s=60)
    order = []
    for request in requests:
        order.append(request.id)
        if request.id == 1:
            requests.require_wanted()
            has_first.set()
            while (2, "dropped") not in states(answers):
                time.sleep(0.001)
            with pytest.raises(RunInterrupted):
                requests.require_wanted()
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

    assert list(Requests(Request, lines(), io.StringIO(), idle_s=0.01)) == []
    never.set()


def answered(served: Served, name: int) -> list[dict[str, Any]]:
    while not (found := served.answers(name)) or found[-1]["state"] not in ENDS:
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


def test_a_program_that_is_about_to_end_is_started_again_when_it_is_asked(tmp_path: Path) -> None:
    program = (
        "import os, time; print(input().replace('}', ', \"state\": \"done\"}'), flush=True); os.close(1)"
    )
    served = Served([sys.executable, "-S", "-c", f"{program}; time.sleep(0.3)"], tmp_path)
    for _ in range(2):
        assert answered(served, served.ask())[0]["state"] == "done"
        process = served._process
        assert process is not None
        assert process.stdin is not None
        while not process.stdin.closed:
            time.sleep(0.002)
    served.close()


def test_a_program_whose_answers_nobody_reads_any_more_ends_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        [sys.executable, "-c", ECHO], input=b'{"id": 1}\n', stdout=writes, stderr=subprocess.PIPE, check=False
    )
    os.close(writes)
    assert (ended.returncode, ended.stderr.strip()) == (0, b"what a library prints")


def test_a_program_tells_how_far_it_is_and_can_be_cancelled_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(serving, "_END_S", 0.01)
    heard = list[str]()
    log = tmp_path / "log"
    with pytest.raises(UserError, match="nothing cannot be started: No such file"):
        Served(["nothing"], tmp_path).ask()
    served = Served(
        [sys.executable, "-c", ECHO], tmp_path, log=log, heard=lambda one: heard.append(one["state"])
    )
    served.cancel()
    assert not served.is_open
    name = served.ask(works=True)
    while heard.count("working") < 3:
        time.sleep(0.002)
    served.cancel()
    assert [one["state"] for one in answered(served, name)] == ["working", "cancelled"]
    assert served.is_open
    assert heard[-1] == "cancelled"
    name = served.ask(works=True)
    while not served.answers(name):
        time.sleep(0.002)
    served.close()  # nobody asks any more, but it would go on
    assert not served.is_open
    assert answered(served, name)[-1]["error"].endswith("exit code -9")
    assert log.read_text() == "what a library prints\n" * 2
