"""This file runs the cases of a stage, each measured in its turn, within a time and the machine's memory."""

import ast
import gc
import hashlib
import importlib.util
import inspect
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gpu.results import SETTLED, Machine, Outcome, Result, ResultFile

from diffsynth_lite.core.transfer.host_pool import available_host_bytes

GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that a stage measures.

    Attributes:
        measure: gives the figures, which json can hold.
        device_gib: most that it may take on the device.
        host_gib: most that it may take in host memory.
        packages: that it imports, beyond those that the trainer needs.
    """

    name: str
    measure: Callable[[], Mapping[str, Any]]
    device_gib: float = 0.0
    host_gib: float = 0.0
    packages: tuple[str, ...] = ()

    def lacks(self) -> str:
        """Why it cannot be measured now: packages, or memory of the host that is free."""
        if missing := [name for name in self.packages if importlib.util.find_spec(name) is None]:
            return f"{', '.join(missing)} not installed"
        available = available_host_bytes()
        if available is not None and self.host_gib * GIB > available:
            return f"needs {self.host_gib:.0f} GiB of host memory of {available / GIB:.0f} that are available"
        return ""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A question, answered by several cases.

    Attributes:
        question: that its results answer.
        minutes: that it may take at most; what is left then is measured the next time.
        cases: of a rehearsal on the CPU, or of a GPU.
        tables: of its results for people to read, in markdown.
        modules: whose code decides what is measured.
    """

    name: str
    question: str
    minutes: float
    cases: Callable[[bool], Sequence[Case]]
    tables: Callable[[Sequence[Result]], Sequence[str]]
    modules: tuple[ModuleType, ...]

    @property
    def version(self) -> str:
        """Differs where the code of the stage does, comments and docstrings left out."""
        code = "".join(map(_code_of, self.modules))
        return hashlib.sha256(code.encode()).hexdigest()[:8]


def _code_of(module: ModuleType) -> str:
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            # Of a docstring, and of a string below an attribute.
            node.body = [line for line in node.body if not _is_text(line)]
    return ast.dump(tree)


def _is_text(line: ast.stmt) -> bool:
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What the cases of a stage are measured with.

    Attributes:
        commit: of the repository.
        retry_before: cases that failed or were skipped before this time, as of a result, are tried again;
            empty tries none of them.
    """

    stage: Stage
    results: ResultFile
    machine: Machine
    rehearse: bool
    commit: str
    retry_before: str

    def remaining(self) -> list[Case]:
        """The cases without a result, in their order."""
        known = self.results.newest(self.stage.name, self.stage.version, self.machine.hardware)
        settled = {
            name
            for name, result in known.items()
            if result.outcome in SETTLED or result.at >= self.retry_before
        }
        return [case for case in self.stage.cases(self.rehearse) if case.name not in settled]

    def note(self, case: str, outcome: Outcome, **values: Any) -> None:
        """Append a result."""
        result = Result(
            stage=self.stage.name,
            version=self.stage.version,
            case=case,
            outcome=outcome,
            machine=self.machine,
            commit=self.commit,
            **values,
        )
        self.results.append(result)
        print(f"{self.stage.name}: {case}: {outcome} {result.reason}".rstrip(), flush=True)

    def measure_remaining(self, at_work: Path) -> None:
        """Measure what remains, in this process, until a case raises an error.

        Args:
            at_work: holds the name of the case that is measured, for whoever sees this process die.
        """
        for case in self.remaining():
            at_work.write_text(case.name)
            if case.device_gib > self.machine.device_gib:
                reason = f"needs {case.device_gib:.0f} GiB of {self.machine.device_gib:.0f} on the device"
                self.note(case.name, "left out", reason=reason)
            elif reason := case.lacks():
                self.note(case.name, "skipped", reason=reason)
            else:
                self._measure(case)
            at_work.unlink()

    def _measure(self, case: Case) -> None:
        started_at = time.perf_counter()
        try:
            values = case.measure()
        except torch.OutOfMemoryError as error:
            self.note(case.name, "left out", reason=f"out of memory: {error}".splitlines()[0])
        except Exception as error:
            self.note(case.name, "failed", reason=f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        else:
            seconds = round(time.perf_counter() - started_at, 1)
            self.note(case.name, "measured", values=values, seconds=seconds)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def run_stage(measurement: Measurement, command: Sequence[str], log: Path) -> None:
    """Measure what remains of a stage, in processes of its own, until its time is up.

    A case whose process ends before its result has failed, and another process continues with those after it.
    What is at work when the time is up is measured the next time, unless it had nearly all of it.

    Args:
        command: starts a process that measures the stage, given a file for the name of the case at work.
        log: of what the processes write to their standard error.
    """
    name, at_work = measurement.stage.name, log.with_suffix(".at_work")
    limit_s = 60 * measurement.stage.minutes
    ends_at = time.monotonic() + limit_s
    log.parent.mkdir(parents=True, exist_ok=True)
    while remaining := measurement.remaining():
        at_work.unlink(missing_ok=True)
        left_s = ends_at - time.monotonic()
        code = _run([*command, str(at_work)], log, left_s)
        case = at_work.read_text() if at_work.exists() else ""
        if code is None:
            if case == remaining[0].name and left_s > 0.9 * limit_s:
                measurement.note(case, "failed", reason=f"not done after {left_s:.0f} s")
            at_work.unlink(missing_ok=True)
            print(f"{name}: its {measurement.stage.minutes:g} minutes are up; the next start continues")
            return
        if code == 0:
            return
        left = measurement.remaining()
        if case in {each.name for each in left} or len(left) == len(remaining):
            reason = f"its process ended with {code}; see {log.name}"
            measurement.note(case or remaining[0].name, "failed", reason=reason)


def _run(command: Sequence[str], log: Path, limit_s: float) -> int | None:
    """The exit code of a command; None where it, and what it started, was killed at the limit."""
    # setpriv: a process that outlived this one would measure next to the next start.
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with log.open("a") as file, subprocess.Popen(command, stderr=file, start_new_session=True) as process:
        try:
            return process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
