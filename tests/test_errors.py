"""Problems that are collected and reported at once, and errors of the machine."""

import errno
import os

import pytest

from diffsynth_lite.errors import Problems, UserError, lacks_files


def refuse(text: str) -> None:
    raise UserError(text)


def test_all_problems_are_reported_at_once_each_of_them_once() -> None:
    problems = Problems()
    assert problems.attempt(lambda: 7) == 7
    for text in ("data.fps: too high", "output.dir: is a file", "data.fps: too high"):
        assert problems.attempt(lambda text=text: refuse(text)) is None
    with pytest.raises(UserError) as raised:
        problems.require_none()
    assert str(raised.value).splitlines() == ["data.fps: too high", "output.dir: is a file"]


def test_nothing_is_raised_where_there_is_no_problem() -> None:
    Problems().require_none()


def test_a_bug_is_no_problem_of_the_user() -> None:
    with pytest.raises(ZeroDivisionError):
        Problems().attempt(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), True),
        # Of the whole machine, which no limit of this process changes.
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), False),
        (RuntimeError("unable to open shared memory object: Too many open files (24)"), True),
        (RuntimeError("received 0 items of ancdata"), True),
        (RuntimeError("received nothing"), False),
    ],
)
def test_a_process_that_can_open_no_more_files_is_known_by_what_its_errors_say(
    error: Exception, lacks: bool
) -> None:
    assert lacks_files(error) is lacks
