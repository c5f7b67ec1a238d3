"""Whether a GPU computes what the CPU does: the tests marked ``gpu``, in shards.

A rehearsal collects and starts them, and reports that they are skipped where there is no CUDA device.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gpu.results import Result
from gpu.stage import Case, Stage
from gpu.tables import markdown, measured

from diffsynth_lite.pipelines import family_names

_ROOT = Path(__file__).parents[2]
_RUNS = "tests/gpu/test_gpu_runs.py"
_NUM_GROUPS = 4


def _shards() -> dict[str, list[str]]:
    """Arguments of pytest; those of all families in groups, as a shard that is cut off gives no result."""
    shards = {
        "engine": ["tests/gpu/test_gpu_engine.py"],
        "whole runs": [_RUNS, "-k", "not every_family"],
    }
    for place in range(_NUM_GROUPS):
        group = [f"--family={name}" for name in family_names()[place::_NUM_GROUPS]]
        part = f"of families, {place + 1} of {_NUM_GROUPS}"
        shards[f"models {part}"] = ["tests/pipelines/test_family_gpu.py", *group]
        shards[f"runs {part}"] = [_RUNS, "-k", "every_family", *group]
    return shards


_FAILURES = ("failure", "error")


def _measure(chosen: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
        # Other versions than those that are tested with may warn of more.
        command += ["-W", "default", f"--junitxml={report}", *chosen]
        done = subprocess.run(command, cwd=_ROOT, stdout=sys.stderr)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and no report")
        tests = list(ElementTree.parse(report).iter("testcase"))
    failed = [test.attrib["name"] for test in tests if any(test.find(tag) is not None for tag in _FAILURES)]
    num_skipped = sum(test.find("skipped") is not None for test in tests)
    return {"passed": len(tests) - len(failed) - num_skipped, "skipped": num_skipped, "failed": failed}


def cases(_rehearse: bool) -> list[Case]:
    """A case a shard."""
    return [Case(name=name, measure=partial(_measure, chosen)) for name, chosen in _shards().items()]


def tables(results: Sequence[Result]) -> list[str]:
    """How many tests passed, and which did not."""
    rows = [
        {
            "tests": result.case,
            "passed": str(result.values["passed"]),
            "skipped": str(result.values["skipped"]),
            "failed": ", ".join(f"`{name}`" for name in result.values["failed"]) or "0",
        }
        for result in measured(results)
    ]
    return [markdown(rows)] if rows else []


STAGE = Stage(
    name="truth",
    question="Does the GPU compute what the CPU does?",
    minutes=8,
    cases=cases,
    tables=tables,
    modules=(sys.modules[__name__],),
)
