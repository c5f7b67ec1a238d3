"""The warning of a launcher that waits less than a stopped run needs."""

import logging
from collections.abc import Callable

import pytest

from diffsynth_lite.training.grace import StopGrace, StopTime
from diffsynth_lite.training.optimizer_step import StepResult

MIB = 2**20
GRACE = StopGrace(seconds=30.0, setting="TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


class Clock:
    """A clock that only the actions of a test move."""

    def __init__(self) -> None:
        self.now = 0.0

    def action(self, seconds: float) -> Callable[[int], None]:
        def act(_step: int) -> None:
            self.now += seconds

        return act


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
    for step, each in enumerate(seconds, start=1):
        stop_time.after_step(
            StepResult(step=step, loss=1.0, grad_norm=1.0, learning_rate=0.1, num_samples=1, seconds=each)
        )


def test_it_says_what_is_needed_and_what_to_set_as_soon_as_three_steps_tell(
    warnings: Callable[[], list[str]],
) -> None:
    stop_time = StopTime(GRACE, save_bytes=600 * MIB)
    take(stop_time, 41.0, 41.0)
    assert warnings() == []
    stop_time.after_step(
        StepResult(step=3, loss=1.0, grad_norm=1.0, learning_rate=0.1, num_samples=1, seconds=41.0)
    )
    assert warnings() == [
        "30 s grace < 47.0 s that a stop signal may wait for (step 41.0 s, save 6.0 s): the launcher would "
        "kill the run before it has saved. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 where it is launched."
    ]


def test_it_is_said_once(warnings: Callable[[], list[str]], clock: Clock) -> None:
    stop_time = StopTime(GRACE, save_bytes=0)
    take(stop_time, *[41.0] * 9)
    stop_time.of_saves(clock.action(50.0))(9)
    stop_time.of_evaluations(clock.action(50.0))(9)
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
    stop_time.of_saves(clock.action(4.0))(2)  # faster than estimated
    take(stop_time, *[25.0] * 2)
    stop_time.of_saves(clock.action(0.1))(4)  # was there already
    assert warnings() == []
    stop_time.of_saves(clock.action(5.5))(6)
    assert "30 s grace < 30.5 s that a stop signal may wait for (step 25.0 s, save 5.5 s)" in warnings()[0]


def test_previews_are_waited_for_too(warnings: Callable[[], list[str]], clock: Clock) -> None:
    stop_time = StopTime(GRACE, save_bytes=0)
    drawn = []
    stop_time.of_evaluations(lambda step: (drawn.append(step), clock.action(29.0)(step))[0])(0)
    assert drawn == [0]
    take(stop_time, *[2.0] * 3)
    assert "(step 2.0 s, evaluation 29.0 s)" in warnings()[0]


def test_an_action_that_fails_is_no_measure(clock: Clock) -> None:
    def fail(_step: int) -> None:
        raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        StopTime(GRACE, save_bytes=0).of_saves(fail)(1)


def test_a_launcher_that_cannot_wait_longer_is_not_given_a_setting(warnings: Callable[[], list[str]]) -> None:
    take(StopTime(StopGrace(seconds=30.0, setting=None), save_bytes=0), *[41.0] * 3)
    (line,) = warnings()
    assert "cannot wait longer" in line
    assert "Set " not in line
