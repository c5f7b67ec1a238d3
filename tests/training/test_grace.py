"""The warning of a launcher that waits less than a stopped run needs."""

import logging
from collections.abc import Callable
from typing import Literal

import pytest

from diffsynth_lite.training.grace import StopGrace, StopTime

MIB = 2**20
GRACE = StopGrace(seconds=30.0, setting="TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_in(self, stop_time: StopTime, part: Literal["evaluation", "save"], seconds: float) -> None:
        """Let an evaluation or a save take so long."""
        with stop_time.timing(part):
            self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("diffsynth_lite.training.grace.time.perf_counter", lambda: clock.now)
    return clock


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings up to now."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.message for record in caplog.records]


def take(stop_time: StopTime, *seconds: float) -> None:
    for each in seconds:
        stop_time.after_step(each)


def test_it_says_what_is_needed_and_what_to_set_as_soon_as_three_steps_tell(
    warnings: Callable[[], list[str]],
) -> None:
    stop_time = StopTime(GRACE, save_bytes=600 * MIB)
    take(stop_time, 41.0, 41.0)
    assert warnings() == []
    stop_time.after_step(41.0)
    assert warnings() == [
        "30 s grace < 47.0 s that a stop signal may wait for (step 41.0 s, save 6.0 s): the launcher would "
        "kill the run before it has saved. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 where it is launched."
    ]


def test_it_is_said_once(warnings: Callable[[], list[str]], clock: Clock) -> None:
    stop_time = StopTime(GRACE, save_bytes=0)
    take(stop_time, *[41.0] * 9)
    clock.pass_in(stop_time, "save", 50.0)
    clock.pass_in(stop_time, "evaluation", 50.0)
    assert len(warnings()) == 1


@pytest.mark.parametrize("grace", [None, StopGrace(seconds=47.0, setting="a")])
def test_nothing_is_said_where_it_fits_or_no_limit_is_known(
    warnings: Callable[[], list[str]], grace: StopGrace | None
) -> None:
    take(StopTime(grace, save_bytes=600 * MIB), *[41.0] * 9)
    assert warnings() == []


def test_neither_the_first_step_nor_a_single_slow_one_counts(warnings: Callable[[], list[str]]) -> None:
    stop_time = StopTime(GRACE, save_bytes=0)
    take(stop_time, 90.0, 1.0, 90.0, 1.0, 1.0)
    assert warnings() == []
    take(stop_time, 31.0)  # the largest bucket comes again
    assert "(step 31.0 s)" in warnings()[0]


def test_a_measured_save_takes_the_place_of_the_estimate_and_the_longest_counts(
    warnings: Callable[[], list[str]], clock: Clock
) -> None:
    stop_time = StopTime(GRACE, save_bytes=600 * MIB)
    take(stop_time, *[25.0] * 2)
    clock.pass_in(stop_time, "save", 4.0)  # faster than estimated
    take(stop_time, *[25.0] * 2)
    clock.pass_in(stop_time, "save", 0.1)  # was there already
    assert warnings() == []
    clock.pass_in(stop_time, "save", 5.5)
    assert "30 s grace < 30.5 s that a stop signal may wait for (step 25.0 s, save 5.5 s)" in warnings()[0]


def test_previews_are_waited_for_too(warnings: Callable[[], list[str]], clock: Clock) -> None:
    stop_time = StopTime(GRACE, save_bytes=0)
    clock.pass_in(stop_time, "evaluation", 29.0)
    take(stop_time, *[2.0] * 3)
    assert "(step 2.0 s, evaluation 29.0 s)" in warnings()[0]


def test_a_save_that_fails_is_no_measure(warnings: Callable[[], list[str]], clock: Clock) -> None:
    stop_time = StopTime(GRACE, save_bytes=0)
    take(stop_time, *[2.0] * 3)

    def fail() -> None:
        with stop_time.timing("save"):
            clock.now += 60.0
            raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        fail()
    take(stop_time, 2.0)
    assert warnings() == []


def test_a_launcher_that_cannot_wait_longer_is_not_given_a_setting(warnings: Callable[[], list[str]]) -> None:
    take(StopTime(StopGrace(seconds=30.0, setting=None), save_bytes=0), *[41.0] * 3)
    (line,) = warnings()
    assert "cannot wait longer" in line
    assert "Set " not in line
