"""Tests that prove an item by themselves, run in a process of their own."""

import re
import subprocess
import sys

from tiny_run import REPOSITORY

from faults.bench import environment

_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0")


def num_passed(*tests: str) -> int:
    """How many cases of some tests passed; none may fail, be skipped or be missing.

    Args:
        tests: files below ``tests``, or tests in one, as pytest names them.
    """
    done = subprocess.run(
        [*_PYTEST, *(f"tests/{test}" for test in tests)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    summary = done.stdout.splitlines()[-1]
    found = re.fullmatch(r"(\d+) passed in .*", summary)
    assert found, summary
    return int(found[1])
