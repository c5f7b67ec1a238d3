"""The parts of a step are timed, and steps that become twice as slow are warned of, once, with the cause."""

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from diffsynth_lite.run_folder.speed import MachineState, SpeedWatch, StepTime, StepTimer, likely_causes

WARM_UP = [("512x512", 9.0)] * 5
FIRST = [("512x512", 1.0)] * 50
IDLE = MachineState(device_used=0.5, clock_mhz=1980.0, celsius=60.0, available=0.5)


def warnings_of(steps: Sequence[tuple[str, float]], caplog: pytest.LogCaptureFixture) -> list[str]:
    watch = SpeedWatch(lambda: IDLE)
    with caplog.at_level(logging.WARNING):
        for sizes, seconds in steps:
            watch.after_step(sizes, seconds, {"data": 0.1})
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("later", "num_warnings"),
    [
        ([("512x512", 2.1)] * 20, 1),
        ([("512x512", 2.1)] * 19, 0),
        ([("512x512", 2.0)] * 40, 0),  # not above twice
        ([("512x512", 9.0)] * 9 + [("512x512", 1.0)] * 11, 0),  # a median of 20
        ([("512x512", 9.0)] * 60 + [("512x512", 1.0)] * 60 + [("512x512", 9.0)] * 60, 1),
        ([("1024x1024", 4.0)] * 90, 0),  # slower from its first step on
        ([("1024x1024", 4.0), ("512x512", 1.0)] * 50 + [("1024x1024", 9.0), ("512x512", 1.0)] * 20, 1),
    ],
)
def test_twice_as_slow_as_the_first_steps_of_the_same_size_is_warned_of_once(
    later: list[tuple[str, float]], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(warnings_of([*WARM_UP, *FIRST, *later], caplog)) == num_warnings


def test_a_warning_has_the_sizes_both_medians_and_that_the_cause_is_not_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    [message] = warnings_of([*WARM_UP, *FIRST, *[("512x512", 3.5)] * 20], caplog)
    assert "the last 20 of 512x512 took 3.5 s, the first 50 took 1 s (medians)" in message
    assert message.endswith("Likely cause: not known.")


@pytest.mark.parametrize(
    ("last", "changes", "cause"),
    [
        (StepTime(3.0, 1.3), {}, "steps wait 1.3 s for data instead of 0.1"),
        (StepTime(3.0, 1.3), {"available": 0.04}, "; 4 % of the host's memory is left"),
        (StepTime(3.0, 0.1), {"device_used": 0.98}, "98 % of the device's memory is taken"),
        (StepTime(3.0, 0.1), {"allocator_retries": 7}, "to free memory of the device 7 times"),
        (StepTime(3.0, 0.1), {"clock_mhz": 900.0, "celsius": 91.0}, "from 1980 to 900 MHz at 91 degrees"),
        (StepTime(3.0, 0.1), {"swapped_bytes": 2**30}, "swapped 1024 MiB"),
        (StepTime(3.0, 0.1), {"load": 2.0}, "want 2.0 times as many processors as there are"),
        (StepTime(3.0, 0.1), {"load": 1.4}, ""),
        (StepTime(3.0, 1.0), {"clock_mhz": 1600.0, "swapped_bytes": 2**27, "device_used": 0.96}, ""),
        (StepTime(3.0, 0.1), {"clock_mhz": None, "device_used": None, "available": 0.04}, ""),
    ],
)
def test_the_cause_is_what_changed_with_the_speed(
    last: StepTime, changes: dict[str, float | None], cause: str
) -> None:
    found = list(likely_causes(StepTime(1.0, 0.1), last, IDLE, replace(IDLE, **changes)))
    assert len(found) == bool(cause)
    assert cause in "".join(found)


def test_a_clock_that_was_not_read_at_first_is_no_cause() -> None:
    slow, before = StepTime(3.0, 0.1), replace(IDLE, clock_mhz=None)
    assert not list(likely_causes(StepTime(1.0, 0.1), slow, before, replace(IDLE, clock_mhz=300.0)))


def test_this_machine_has_a_state() -> None:
    state = MachineState.read(torch.device("cpu"))
    assert 0 < state.available < 1
    assert state.swapped_bytes >= 0
    assert state.device_used is None


def test_a_part_lasts_from_the_mark_before_and_parts_of_a_name_are_added(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks) ** 2))
    timer = StepTimer()
    for part in ("between", "data", "forward", "backward", "forward", "backward"):
        timer.mark(part)
    assert timer.seconds() == {"data": 1.0, "forward": 3.0 + 7.0, "backward": 5.0 + 9.0}
    timer.mark("update")
    assert timer.seconds() == {"update": 11.0}


def test_on_a_gpu_nothing_waits_for_an_event_and_its_part_is_counted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at_ms, self.is_over = 1000.0 * len(made) ** 2, not made
            made.append(self)

        def record(self) -> None: ...

        def query(self) -> bool:
            return self.is_over

        def elapsed_time(self, end: "Event") -> float:
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = StepTimer(torch.device("cuda"))
    for part in ("between", "data", "forward"):
        timer.mark(part)
    assert timer.seconds() == {}
    made[1].is_over = True
    assert timer.seconds() == {"data": 1.0}
    made[2].is_over = True
    assert timer.seconds() == {"forward": 3.0}


def test_a_device_that_computes_later_without_events_has_no_parts() -> None:
    timer = StepTimer(torch.device("mps"))
    timer.mark("between")
    timer.mark("data")
    assert timer.seconds() == {}
