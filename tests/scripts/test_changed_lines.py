"""Each mutant changes a line that there is, and names tests that there are."""

import pytest
from mutants.__main__ import read_mutants


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.id)
def test_a_mutant_changes_one_line_and_has_tests(mutant) -> None:
    assert mutant.changed() != mutant.old
    assert mutant.test_files()
