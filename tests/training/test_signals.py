"""A stop signal becomes a question; its echo is the same event, a later second one quits."""

import os
import signal
import subprocess
import sys

import pytest

from diffsynth_lite.errors import RunInterrupted
from diffsynth_lite.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_asks_to_stop_and_its_echo_does_not_kill(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = StopRequest()
    with stop.listening():
        stop.let_steps_finish()
        assert not stop.asked
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.asked
    assert signal.getsignal(number) is before


def test_before_the_first_step_a_signal_stops_the_run_where_it_is() -> None:
    stop = StopRequest()
    with pytest.raises(RunInterrupted, match="SIGTERM before the first step"), stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)  # the launcher's echo while the run cleans up
    assert stop.asked


SECOND_SIGNAL = """
import os, signal
from diffsynth_lite.training import signals
signals._SAME_EVENT_S = 0.0
stop = signals.StopRequest()
with stop.listening():
    stop.let_steps_finish()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    print("still alive")
"""


def test_a_second_signal_quits_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SECOND_SIGNAL], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == ""
