"""Problems that are collected and reported at once."""

import pytest

from diffsynth_lite.errors import Problems, UserError


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
