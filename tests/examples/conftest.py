"""Makes the scripts of the quickstart importable by the names they import each other by."""

import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
sys.path[:0] = [str(QUICKSTART), str(QUICKSTART / "rebuild")]


@pytest.fixture(scope="session")
def quickstart() -> Path:
    """The folder of the quickstart."""
    return QUICKSTART
