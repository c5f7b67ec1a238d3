"""This file says where a run is: its state, how it ended, how far it got and how long it took."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from diffsynth_lite.report.series import as_number

_STATES = {
    "running": "Running",
    "finished": "Finished",
    "interrupted": "Interrupted",
    "stopped": "Stopped",
    "diverged": "Diverged",
    "failed": "Failed",
    "killed": "Killed",
    "unreadable": "Unreadable",
}
_NOT_STARTED = "Not started"
_LATEST_TIME = 253_402_300_799
"""The end of the year 9999, in seconds since 1970: calendars know no later one."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where a run is.

    Attributes:
        name: the state of ``status.json``, ``killed`` where that says running and nobody does, ``unreadable``
            where nothing could be read, or ``not started``.
        message: how it ended, in the trainer's words; empty while it runs.
        step: optimizer steps done, or tried where the run diverged; where it ended early otherwise and could
            say so, those of its last checkpoint.
        total_steps: of the whole run; None where nothing says.
        samples_per_s: while it runs.
        seconds_left: while it runs.
        seconds_taken: from start to last sign, without the time between starts; None where nothing says.
        seen_at: last sign of the trainer, seconds since 1970.
    """

    name: str
    message: str
    step: int
    total_steps: int | None
    samples_per_s: float | None
    seconds_left: float | None
    seconds_taken: float | None
    seen_at: float | None

    @property
    def title(self) -> str:
        """The state as a word for people."""
        return _STATES.get(self.name, _NOT_STARTED)

    @property
    def is_running(self) -> bool:
        """Whether the run goes on, as far as its folder says."""
        return self.name == "running"

    @property
    def done_ratio(self) -> float | None:
        """Part of the steps that are done, in [0, 1]."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None


def read_state(
    status: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    lineage: Sequence[Any],
    *,
    is_abandoned: bool,
    total_steps: float | None,
) -> RunState:
    """Where a run is.

    Args:
        status: of ``status.json``.
        rows: of ``metrics.jsonl``.
        lineage: of ``lineage.json``.
        is_abandoned: whether the process that took the folder's lock last is gone.
        total_steps: ``train.steps``, for a status that does not say.
    """
    name = str(status.get("state"))
    if name not in _STATES:
        name = "not started"
    if name == "running" and is_abandoned:
        name = "killed"
    is_running = name == "running"
    times = [time for row in rows if (time := _as_time(row)) is not None]
    signs = [*times[-1:], *filter(None, [_as_time(status)])]
    steps = [as_number(status.get("step"))]
    if name in ("running", "killed", "diverged"):
        steps += [as_number(row.get("step")) for row in rows[-1:]]
    total = as_number(status.get("total_steps")) or total_steps
    return RunState(
        name=name,
        message="" if is_running else str(status.get("message", "")),
        step=int(max(filter(None, steps), default=0)),
        total_steps=int(total) if total else None,
        samples_per_s=as_number(status.get("samples_per_s")) if is_running else None,
        seconds_left=as_number(status.get("seconds_left")) if is_running else None,
        seconds_taken=_seconds_taken(times, lineage),
        seen_at=max(signs, default=None),
    )


def _as_time(row: Mapping[str, Any]) -> float | None:
    time = as_number(row.get("time"))
    return time if time is not None and 0 <= time <= _LATEST_TIME else None


def _seconds_taken(times: Sequence[float], lineage: Sequence[Any]) -> float | None:
    """Time from each start to the last row before the next start."""
    starts = [start for entry in lineage if (start := started_at(entry)) is not None]
    total = 0.0
    for start, end in pairwise([*starts, math.inf]):
        total += max((time - start for time in times if start <= time < end), default=0.0)
    return total or None


def started_at(entry: object) -> float | None:
    """When a start of the lineage was, in seconds since 1970."""
    try:
        return datetime.fromisoformat(entry["at"]).timestamp()  # type: ignore[index]
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
