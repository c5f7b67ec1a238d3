"""This file keeps what was measured: one line of JSON a case, appended as soon as it is known."""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

Outcome = Literal["measured", "failed", "left out", "skipped"]
"""left out: the device has too little memory for it. skipped: a package that it needs is not installed, or
too little memory of the host was free."""
SETTLED = ("measured", "left out")
"""Outcomes that stay as they are when a stage is run again."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware and the software that a result is of.

    Attributes:
        device: name of the GPU; CPU for a rehearsal.
        device_gib: memory of the GPU, or of the machine for a rehearsal.
        driver: version of its driver; empty where it cannot be asked.
        num_cores: of the CPU.
    """

    device: str
    device_gib: float
    driver: str
    torch: str
    num_cores: int
    host_gib: float

    @property
    def hardware(self) -> str:
        """What must be equal for results to be of the same machine."""
        return f"{self.device}, {self.device_gib:.0f} GiB"

    @classmethod
    def here(cls, *, rehearse: bool) -> "Machine":
        """This one."""
        host_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        device, device_gib = "CPU", host_gib
        if not rehearse:
            device = torch.cuda.get_device_name()
            device_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        return cls(
            device=device,
            device_gib=round(device_gib, 1),
            driver="" if rehearse else _driver(),
            torch=torch.__version__,
            num_cores=len(os.sched_getaffinity(0)),
            host_gib=round(host_gib, 1),
        )


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a case.

    Attributes:
        version: of the stage's code; results of another one no longer count.
        values: figures by name, in s, bytes or as the stage says.
        reason: why there are none.
        commit: of the repository.
        at: when, in UTC.
        seconds: that the case took.
    """

    stage: str
    version: str
    case: str
    outcome: Outcome
    machine: Machine
    commit: str
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0
    at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


class ResultFile:
    """A file of results, which several processes append to one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, result: Result) -> None:
        """Write a result so that it survives whatever ends this process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # the line before was cut off
                    file.write(b"\n")
            file.write(json.dumps(asdict(result)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Result]:
        """All results, the oldest first; a line that was cut off is left out."""
        if not self.path.exists():
            return []
        rows = filter(None, map(_parsed, self.path.read_text(errors="replace").splitlines()))
        return [Result(**row | {"machine": Machine(**row["machine"])}) for row in rows]

    def newest(self, stage: str, version: str, hardware: str) -> dict[str, Result]:
        """The newest result of each case of a stage, of this version and hardware."""
        return {
            result.case: result
            for result in self.read()
            if (result.stage, result.version, result.machine.hardware) == (stage, version, hardware)
        }


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def current_commit() -> str:
    """The commit that is checked out, with ``+`` where files were changed; empty outside of a repository."""
    commit = _output_of(["git", "rev-parse", "--short", "HEAD"])
    return commit + "+" if commit and _output_of(["git", "status", "--porcelain", "-uno"]) else commit


def _driver() -> str:
    lines = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()
    return lines[0] if lines else ""


def _output_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
