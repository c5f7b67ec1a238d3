"""Signals, request files, and the warning of a launcher that waits less than a stopped run needs."""

import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from pretended_processes import PretendedProcesses
from processes import Program

from diffsynth_lite.errors import RunInterrupted, RunStoppedError
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training import stopping
from diffsynth_lite.training.stopping import (
    Asked,
    GracePeriod,
    Patience,
    PreviewsStoppedError,
    Requests,
    ShutdownBudget,
    StopRequest,
    remove_old_requests,
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_asks_to_stop_and_its_echo_does_not_kill(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)  # The suite itself may run under nohup.
    try:
        stop = StopRequest()
        with stop.listening():
            stop.steps_finish = True
            assert not stop.asked
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
            assert stop.asked
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_hangup_that_is_ignored_as_under_nohup_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_before_the_first_step_a_signal_stops_the_run_where_it_is() -> None:
    stop = StopRequest()
    with pytest.raises(RunInterrupted, match="SIGTERM before the first step"), stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher's echo while the run cleans up
    assert stop.asked


@pytest.mark.parametrize("by_file", [True, False])
def test_a_file_and_a_signal_together_end_a_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_file: bool
) -> None:
    monkeypatch.setattr(stopping, "_LOOK_EVERY_S", 0.0)
    requests = requests_of(tmp_path)
    requests.signals = StopRequest()
    with requests.signals.listening():
        (tmp_path / "STOP").touch()
        with pytest.raises(RunInterrupted, match="STOP before the first step" if by_file else "SIGTERM bef"):
            requests.watch("encoding") if by_file else signal.raise_signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT):  # while the run cleans up
            signal.raise_signal(number)
    assert (tmp_path / "STOP").exists() is not by_file


def test_before_the_first_step_only_a_stop_is_answered_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(stopping, "_LOOK_EVERY_S", 0.0)
    requests = requests_of(tmp_path)
    requests.signals = StopRequest()
    for name in ("SAVE", "SAMPLE"):
        (tmp_path / name).touch()
        requests.watch("encoding")
        requests.watch("loading")
    assert caplog.messages == [
        f"{name}: found in the run folder; it is done after the first step." for name in ("SAVE", "SAMPLE")
    ]
    requests.let_steps_begin()
    (tmp_path / "STOP").touch()
    requests.watch("loading")  # in a step: that one is finished
    with pytest.raises(PreviewsStoppedError):
        requests.watch("generating")
    assert requests.gather() == Asked(stop=True, save=True, evaluate=True)
    with pytest.raises(PreviewsStoppedError):  # those of the last step
        requests.watch("generating")


SECOND_SIGNAL = """
import os, signal
from diffsynth_lite.training import stopping
stopping._SAME_EVENT_S = 0.0
stop = stopping.StopRequest()
with stop.listening():
    stop.steps_finish = True
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    print("still alive")
"""


def test_a_second_signal_quits_at_once(tmp_path: Path) -> None:
    script = tmp_path / "second_signal.py"
    script.write_text(SECOND_SIGNAL)
    program = Program(script, [], tmp_path / "printed")
    assert program.wait() == -signal.SIGTERM
    assert "still alive" not in program.printed()


NOTHING = Asked(stop=False, save=False, evaluate=False)


def requests_of(
    folder: Path, *, minutes: float | None = None, hours: float | None = None, **process: Any
) -> Requests:
    """The requests of a run in ``folder``, whose signals ask for nothing yet."""
    accelerator = SimpleNamespace(**({"num_processes": 1, "is_main_process": True} | process))
    signals = SimpleNamespace(asked=False, command=": train")
    return Requests(RunFolder(folder), signals, accelerator, minutes, max_hours=hours, seconds_gone=100.0)


@pytest.mark.parametrize(("name", "what"), [("SAVE", "save"), ("SAMPLE", "evaluate"), ("STOP", "stop")])
def test_a_file_asks_once_and_is_gone(tmp_path: Path, name: str, what: str) -> None:
    requests = requests_of(tmp_path)
    assert requests.gather() == NOTHING
    (tmp_path / name).write_text("please")
    assert requests.gather() == NOTHING._replace(**{what: True})
    assert requests.gather() == NOTHING
    assert list(tmp_path.iterdir()) == []


def test_a_signal_stops(tmp_path: Path) -> None:
    requests = requests_of(tmp_path)
    requests.signals.asked = True
    assert requests.gather() == NOTHING._replace(stop=True)


def test_files_from_before_the_start_ask_for_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "STOP").touch()
    (tmp_path / "other").touch()
    remove_old_requests(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    assert f"removed the leftover request file {tmp_path / 'STOP'}" in caplog.text


def test_a_folder_of_that_name_is_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "SAVE").mkdir()
    assert requests_of(tmp_path).gather() == NOTHING
    assert "so it is not a request" in caplog.text


@pytest.mark.parametrize(("planned", "saved_after"), [((), [3, 6]), ((2, 4, 6), [2, 4, 6])])
def test_time_without_a_save_asks_for_one_and_a_planned_save_counts_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: Sequence[int], saved_after: list[int]
) -> None:
    now = [1000.0]
    monkeypatch.setattr("diffsynth_lite.training.stopping.time.monotonic", lambda: now[0])
    requests = requests_of(tmp_path, minutes=2)
    saves = []
    for step in range(1, 8):
        now[0] += 50
        if requests.gather().save or step in planned:
            saves.append(step)
            requests.note_save()
    assert saves == saved_after


def test_the_hours_of_a_start_count_from_its_beginning_and_end_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("diffsynth_lite.training.stopping.time.monotonic", lambda: now[0])
    requests = requests_of(tmp_path, hours=0.5)
    now[0] += 1699
    assert (requests.gather(), requests.cause) == (NOTHING, None)
    now[0] += 1
    assert requests.gather() == NOTHING._replace(stop=True)
    message = "train.max_hours: 0.5 hours have passed; the same command continues it for as long again: train"
    assert requests.cause == message

    def reduce(flags: Any, reduction: str) -> Any:
        return flags + flags.new_tensor([0, 1, 0, 0, 0])  # the clock of the main process

    other = requests_of(
        tmp_path, hours=0.5, num_processes=2, is_main_process=False, device="cpu", reduce=reduce
    )
    now[0] += 9999  # which the others do not look at
    assert other.gather() == NOTHING._replace(stop=True)
    assert other.cause == message


@pytest.mark.parametrize(
    ("losses", "num_since", "compared_with"),
    [
        ([[5, 6, 7]], 0, 0),
        ([[5, 6, 7], [4.0, 5.1, 6.0]], 0, 10),
        # Lower in the mean, and not shown to be so.
        ([[5, 6, 7], [1.0, 6.1, 7.2]], 1, 0),
        ([[5, 6, 7], [6.0, 7.1, 8.0]], 1, 0),
        # Small steps add up.
        ([[5, 6, 7], [4.9, 5.7, 7.0], [4.8, 5.75, 6.8]], 0, 20),
        ([[5, 6, 7], [4.0, 5.1, 6.0], [5, 6, 7], [4.0, 5.1, 6.0]], 2, 10),
        # A single item shows nothing.
        ([[5], [4], [3]], 2, 0),
        ([[], [], []], 0, 0),
        ([[math.nan, 6], [5, 6], [math.inf, 1], [4.9, 5.9]], 0, 30),
    ],
)
def test_patience_counts_evaluations_that_are_not_shown_to_be_better(
    losses: list[list[float]], num_since: int, compared_with: int
) -> None:
    patience = Patience(2, 10)
    for place, by_item in enumerate(losses):
        patience.note(10 * place, [by_item])
        patience.note(10 * place + 1, [[99.0 for _ in by_item]])  # asked for in between
        patience.note(10 * place, [[99.0 for _ in by_item]])  # again, after a resume
    found = patience.document()
    assert (found["num_since"], found["step"]) == (num_since, compared_with)
    assert (patience.cause is not None) == (num_since == 2)
    assert Patience(3, 10, found).cause is None
    assert Patience(3, 10, found).document() == found
    assert Patience(None).cause is None


def test_the_means_of_several_samples_add_up_and_few_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    Patience(1).note(0, [[0.5] * 8])
    assert caplog.messages == []
    patience = Patience(1, 10, progress="a higher score")
    patience.note(0, [[5, 6, 7], [1, 1]])
    assert caplog.messages[0].startswith("train.stop_after: compares 2 values, which show little")
    patience.note(10, [[4.9, 5.9, 6.9], [1.0, 1.1]])
    assert str(patience.cause).endswith("did not show a higher score; a larger number continues it")
    patience.note(20, [[4.9, 5.9, 6.9], [1.05, 1.05]])
    assert (patience.document()["step"], patience.cause) == (20, None)


def test_any_process_that_is_asked_to_stop_stops_all_and_only_the_main_one_looks_at_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "SAVE").touch()
    sent = []

    def reduce(flags: Any, reduction: str) -> Any:
        sent.append((flags.tolist(), reduction))
        return flags + flags.new_tensor([0, 0, 1, 0, 1])  # what another process adds

    requests = requests_of(tmp_path, num_processes=2, is_main_process=False, device="cpu", reduce=reduce)
    assert requests.gather() == Asked(stop=True, save=False, evaluate=True)
    assert sent == [([0, 0, 0, 0, 0], "sum")]
    assert (tmp_path / "SAVE").exists()


def test_a_stop_ends_all_processes_before_the_first_step_also_those_that_see_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, flag = PretendedProcesses(monkeypatch, num_machines=1, num_local=2), threading.Event()
    monkeypatch.setattr(stopping, "SharedFlag", lambda *_: flag)
    (tmp_path / "STOP").touch()

    def begin(accelerator: Any, _machine: int) -> None:
        requests = Requests(RunFolder(tmp_path), StopRequest(), accelerator, None)
        if accelerator.is_main_process:
            requests.watch("encoding")
        flag.wait()
        requests.watch("encoding")

    assert [type(end) for end in processes.run(begin)] == [RunInterrupted] * 2
    assert list(tmp_path.iterdir()) == []
    flag.clear()
    (tmp_path / "STOP").touch()
    ends = processes.run(
        lambda accelerator, _: Requests(
            RunFolder(tmp_path), StopRequest(), accelerator, None
        ).let_steps_begin()
    )
    assert [type(end) for end in ends] == [RunInterrupted] * 2


def test_a_lost_run_folder_ends_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = PretendedProcesses(monkeypatch, num_machines=1, num_local=2)

    def gather(accelerator: Any, _machine: int) -> Asked:
        signals = SimpleNamespace(asked=False)
        return Requests(RunFolder(tmp_path / "renamed"), signals, accelerator, None).gather()

    ends = processes.run(gather)
    assert all(isinstance(end, RunStoppedError) for end in ends)
    assert all("renamed was renamed or removed" in str(end) for end in ends)


MIB = 2**20
GRACE = GracePeriod(seconds=30.0, setting="TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_in(self, shutdown: ShutdownBudget, part: Literal["evaluation", "save"], seconds: float) -> None:
        """Let an evaluation or a save take so long."""
        with shutdown.timing(part):
            self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("diffsynth_lite.training.stopping.time.perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings up to now."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.message for record in caplog.records]


def take(shutdown: ShutdownBudget, *seconds: float) -> None:
    for each in seconds:
        shutdown.after_step(each)


def test_it_logs_once_what_is_needed_and_what_to_set_as_soon_as_three_steps_show_it(
    warnings: Callable[[], list[str]], clock: Clock
) -> None:
    shutdown = ShutdownBudget(GRACE, save_bytes=600 * MIB)
    take(shutdown, 41.0, 41.0)
    assert warnings() == []
    take(shutdown, *[41.0] * 7)
    clock.pass_in(shutdown, "save", 50.0)
    clock.pass_in(shutdown, "evaluation", 50.0)
    assert warnings() == [
        "30 s grace < 47.0 s that a stop signal may wait for (step 41.0 s, save 6.0 s): the launcher would "
        "kill the run before it has saved. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 where it is launched."
    ]


@pytest.mark.parametrize("grace", [None, GracePeriod(seconds=47.0, setting="a")])
def test_nothing_is_logged_where_it_fits_or_no_limit_is_known(
    warnings: Callable[[], list[str]], grace: GracePeriod | None
) -> None:
    take(ShutdownBudget(grace, save_bytes=600 * MIB), *[41.0] * 9)
    assert warnings() == []


def test_neither_the_first_step_nor_a_single_slow_one_counts(warnings: Callable[[], list[str]]) -> None:
    shutdown = ShutdownBudget(GRACE, save_bytes=0)
    take(shutdown, 90.0, 1.0, 90.0, 1.0, 1.0)
    assert warnings() == []
    take(shutdown, 31.0)  # the largest bucket comes again
    assert "(step 31.0 s)" in warnings()[0]


def test_a_measured_save_takes_the_place_of_the_estimate_and_the_longest_counts(
    warnings: Callable[[], list[str]], clock: Clock
) -> None:
    shutdown = ShutdownBudget(GRACE, save_bytes=600 * MIB)
    take(shutdown, *[25.0] * 2)
    clock.pass_in(shutdown, "save", 4.0)  # faster than estimated
    take(shutdown, *[25.0] * 2)
    clock.pass_in(shutdown, "save", 0.1)  # was there already
    assert warnings() == []
    clock.pass_in(shutdown, "save", 5.5)
    assert "30 s grace < 30.5 s that a stop signal may wait for (step 25.0 s, save 5.5 s)" in warnings()[0]


def test_an_evaluation_is_waited_for_too(warnings: Callable[[], list[str]], clock: Clock) -> None:
    shutdown = ShutdownBudget(GRACE, save_bytes=0)
    clock.pass_in(shutdown, "evaluation", 29.0)
    take(shutdown, *[2.0] * 3)
    assert "(step 2.0 s, evaluation 29.0 s)" in warnings()[0]


def test_a_save_that_fails_is_no_measure(warnings: Callable[[], list[str]], clock: Clock) -> None:
    shutdown = ShutdownBudget(GRACE, save_bytes=0)
    take(shutdown, *[2.0] * 3)

    def fail() -> None:
        with shutdown.timing("save"):
            clock.now += 60.0
            raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        fail()
    take(shutdown, 2.0)
    assert warnings() == []


def test_a_launcher_that_cannot_wait_longer_is_not_given_a_setting(warnings: Callable[[], list[str]]) -> None:
    take(ShutdownBudget(GracePeriod(seconds=30.0, setting=None), save_bytes=0), *[41.0] * 3)
    (line,) = warnings()
    assert "cannot wait longer" in line
    assert "Set " not in line
