import logging

from diffsynth_lite.progress_log import ProgressLog


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_each_tenth_has_a_line_with_speed_and_time_left(caplog):
    clock = Clock()
    with caplog.at_level(logging.INFO):
        pace = ProgressLog("encoded %d of %d items", 20, phase="encoding", clock=clock)
        for _ in range(20):
            clock.now += 0.5
            pace.advance()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 10
    assert messages[0] == "encoded 2 of 20 items, 2/s, 9 s left"
    assert messages[-1] == "encoded 20 of 20 items, 2/s, 0 s left"


def test_slow_steps_have_a_line_every_ten_seconds(caplog):
    clock = Clock()
    with caplog.at_level(logging.INFO):
        pace = ProgressLog("encoded %d of %d items", 1000, phase="encoding", clock=clock)
        for _ in range(9):
            clock.now += 4
            pace.advance()
    assert [record.getMessage() for record in caplog.records] == [
        "encoded 3 of 1000 items, 0.25/s, 3988 s left",
        "encoded 6 of 1000 items, 0.25/s, 3976 s left",
        "encoded 9 of 1000 items, 0.25/s, 3964 s left",
    ]


def test_a_clock_that_stands_still_is_no_error(caplog, monkeypatch):
    monkeypatch.setattr("diffsynth_lite.progress_log._TENTH_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        ProgressLog("encoded %d of %d items", 1, phase="encoding", clock=Clock()).advance()
    assert "1 of 1" in caplog.text


def test_a_pass_that_is_over_in_no_time_has_no_lines(caplog):
    clock = Clock()
    with caplog.at_level(logging.INFO):
        pace = ProgressLog("encoded %d of %d items", 5, phase="encoding", clock=clock)
        for _ in range(5):
            clock.now += 0.1
            pace.advance()
    assert not caplog.records
