"""The parts of a step are timed, and steps that become twice as slow are warned of, once, with the cause."""

import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diffsynth_lite.run_folder.speed import MachineState, SpeedWatch, StepTime, StepTimer, likely_causes

IDLE = MachineState(device_used=0.5, clock_mhz=1980.0, celsius=60.0, available=0.5)


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
    watch = SpeedWatch(lambda: IDLE)
    for sizes, seconds in [*[("512x512", 9.0)] * 5, *[("512x512", 1.0)] * 50, *later]:
        watch.after_step(sizes, seconds, {"data": 0.1})
    assert len(caplog.messages) == num_warnings
    if later == [("512x512", 2.1)] * 20:
        assert "slower (512x512): the last 20 took 2.1 s, the first 50 took 1 s (medians)" in caplog.text
        assert caplog.messages[0].endswith("Likely cause: not known.")


@pytest.mark.parametrize(
    ("waiting", "changes", "cause"),
    [
        (1.3, {}, "steps wait 1.3 s for data instead of 0.1"),
        (1.3, {"available": 0.04}, "; 4 % of the host's memory is left"),
        (0.1, {"device_used": 0.98}, "98 % of the device's memory is taken"),
        (0.1, {"allocator_retries": 7}, "to free memory of the device 7 times"),
        (0.1, {"clock_mhz": 900.0, "celsius": 91.0}, "from 1980 to 900 MHz at 91 degrees"),
        (0.1, {"swapped_bytes": 2**30}, "swapped 1024 MiB"),
        (0.1, {"load": 2.0}, "want 2.0 times as many processors as there are"),
        (0.1, {"load": 1.4}, ""),
        (1.0, {"clock_mhz": 1600.0, "swapped_bytes": 2**27, "device_used": 0.96}, ""),
        (0.1, {"clock_mhz": None, "device_used": None, "available": 0.04}, ""),
    ],
)
def test_the_cause_is_what_changed_with_the_speed(
    waiting: float, changes: dict[str, Any], cause: str
) -> None:
    times = StepTime(1.0, 0.1), StepTime(3.0, waiting)
    found = list(likely_causes(*times, IDLE, replace(IDLE, **changes)))
    assert len(found) == bool(cause)
    assert cause in "".join(found)
    # A clock that was not read at first is no cause.
    unread = list(likely_causes(*times, replace(IDLE, clock_mhz=None), replace(IDLE, **changes)))
    assert unread == [one for one in found if "MHz" not in one]


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
    timer, of_others = StepTimer(), StepTimer(torch.device("mps"))
    for part in ("between", "data", "forward", "backward", "forward", "backward"):
        timer.mark(part)
        of_others.mark(part)
    assert timer.seconds() == {"data": 1.0, "forward": 3.0 + 7.0, "backward": 5.0 + 9.0}
    timer.mark("update")
    assert timer.seconds() == {"update": 11.0}
    assert of_others.seconds() == {}


def test_on_a_gpu_nothing_waits_for_an_event_and_its_part_is_counted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def event(*, enable_timing: bool) -> Any:
        at_ms = 1000.0 * len(made) ** 2
        event = SimpleNamespace(at_ms=at_ms, record=lambda: None, query=lambda: event in made[:num_over])
        event.elapsed_time = lambda end: end.at_ms - at_ms
        made.append(event)
        return event

    monkeypatch.setattr(torch.cuda, "Event", event)
    timer, num_over = StepTimer(torch.device("cuda")), 1
    for part in ("between", "data", "forward"):
        timer.mark(part)
    assert timer.seconds() == {}
    num_over = 2
    assert timer.seconds() == {"data": 1.0}
    num_over = 3
    assert timer.seconds() == {"forward": 3.0}
