"""Makes the scripts of the examples importable by the names they import each other by."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICKSTART = EXAMPLES / "quickstart"
sys.path[:0] = [str(QUICKSTART), str(QUICKSTART / "rebuild"), str(EXAMPLES / "ray")]


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The folder of the quickstart."""
    return QUICKSTART
