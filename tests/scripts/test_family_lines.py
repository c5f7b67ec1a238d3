"""The count of the families' lines leaves out what is no code, and finds what two files share."""

import pytest
from family_lines import code_lines, main, shared_runs

from diffsynth_lite.pipelines import family_names

SOURCE = '''"""A file."""

import os


# A comment.
def first(value: int) -> str:
    """A function.

    With more to say.
    """
    text = """two
lines"""
    return text * value  # as often
'''


def test_lines_of_code_are_neither_blank_nor_comments_nor_docstrings() -> None:
    code = [
        "def first(value: int) -> str:",
        'text = """two',
        'lines"""',
        "return text * value  # as often",
    ]
    assert code_lines(SOURCE) == ["import os", *code]
    assert code_lines(SOURCE, with_imports=False) == code


def test_shared_runs_are_those_of_six_lines_and_more() -> None:
    same = [f"line {place}" for place in range(6)]
    assert list(shared_runs(["a", *same, "b"], ["c", *same])) == [same]
    assert not list(shared_runs(["a", *same[1:]], ["c", *same[1:]]))


def test_every_family_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in family_names())
