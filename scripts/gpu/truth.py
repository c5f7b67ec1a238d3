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

_ROOT = Path(__file__).parents[2]
_SHARDS = {
    "engine": ("tests/gpu/test_gpu_engine.py",),
    "whole runs": ("tests/gpu/test_gpu_runs.py", "-k", "not every_family"),
    "every family's model": ("tests/pipelines/test_family_gpu.py",),
    "every family's run": ("tests/gpu/test_gpu_runs.py", "-k", "every_family"),
}
_FAILURES = ("failure", "error")


def _measure(chosen: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            "setpriv",
            "--pdeathsig",
            "KILL",
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            f"--junitxml={report}",
            *chosen,
        ]
        done = subprocess.run(command, cwd=_ROOT, stdout=sys.stderr)
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode} and no report")
        tests = list(ElementTree.parse(report).iter("testcase"))
    failed = [test.attrib["name"] for test in tests if any(test.find(tag) is not None for tag in _FAILURES)]
    num_skipped = sum(test.find("skipped") is not None for test in tests)
    return {"passed": len(tests) - len(failed) - num_skipped, "skipped": num_skipped, "failed": failed}


def cases(_rehearse: bool) -> list[Case]:
    """A case a shard."""
    return [Case(name=name, measure=partial(_measure, chosen)) for name, chosen in _SHARDS.items()]


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
