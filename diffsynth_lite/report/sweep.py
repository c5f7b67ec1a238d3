"""This file compares the runs of a sweep: what came of each, which is best, and which are as good."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.report.page import duration
from diffsynth_lite.report.run_report import RunReport
from diffsynth_lite.report.scores import REASONS, with_interval
from diffsynth_lite.scores.recommendation import Interval, Recommendation, recommend
from diffsynth_lite.scores.record import BASE_STEP, FILE_NAME, ScoreRecord, read_scores

BEST, AS_GOOD = "best", "not distinguishable"
_SCORED = "Compared by the score of the best step, with an interval at 95 % for all runs together."
_BY_LOSS = (
    "Compared by the lowest loss on held-out data, which has no interval: a small difference may be chance. "
    "validation.scores compares by images."
)
_NOT_COMPARED = "No run is best: none has a loss on held-out data (validation.data) or scores."
_RESULTS = ("state", "loss on held-out data", "score", "time", "memory", "result")
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """A run of a sweep.

    Attributes:
        differs: the settings in which the runs differ, with the values of this one.
        loss: the lowest on held-out data, at ``loss_step``.
        score: Z of its best saved step, ``score_step``, with an interval for all of the runs together.
        result: of the comparison: empty, "best", or "not distinguishable" from the best one.
    """

    name: str
    differs: Mapping[str, str]
    state: str
    loss: float | None
    loss_step: int | None
    score: Interval | None = None
    score_step: int | None = None
    seconds: float | None
    peak_memory_gib: float | None
    result: str = ""

    @classmethod
    def of(cls, report: RunReport, differs: Mapping[str, str]) -> "SweptRun":
        """What a run has come to."""
        losses = report.series["validation_loss"].points if "validation_loss" in report.series else []
        loss, loss_step = min(((loss, step) for step, loss in losses), default=(None, None))
        memory = report.series["peak_memory_gib"].points if "peak_memory_gib" in report.series else []
        top = report.scores.top if report.scores else None
        return cls(
            name=report.name,
            differs=differs,
            state=report.state.name,
            loss=loss,
            loss_step=loss_step,
            score=top.total if top else None,
            score_step=top.step if top else None,
            seconds=report.state.seconds_taken,
            peak_memory_gib=memory[-1][1] if memory else None,
        )

    def line(self) -> dict[str, str]:
        """Its row of the table, by the names of the columns."""
        memory = self.peak_memory_gib
        return {
            **self.differs,
            "state": self.state,
            "loss on held-out data": "" if self.loss is None else f"{self.loss:.4g} at step {self.loss_step}",
            "score": f"{with_interval(self.score)} at step {self.score_step}" if self.score else "",
            "time": "" if self.seconds is None else duration(self.seconds),
            "memory": "" if memory is None else format_bytes(int(memory * _GIB)),
            "result": self.result,
        }


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Runs that differ in some settings.

    Attributes:
        reason: what the best one was chosen by, or why none was.
    """

    runs: Sequence[SweptRun]
    reason: str

    @property
    def columns(self) -> Sequence[str]:
        """The names of the columns of the table."""
        return *self.runs[0].differs, *_RESULTS


def compare_runs(reports: Sequence[RunReport], differs: Sequence[Mapping[str, str]]) -> Sweep:
    """Compare runs by the scores of their best steps, or else by their lowest losses on held-out data."""
    runs = [SweptRun.of(report, settings) for report, settings in zip(reports, differs, strict=True)]
    tops = {
        run.name: (scores.record, top.step)
        for run, report in zip(runs, reports, strict=True)
        if (scores := report.scores) is not None and (top := scores.top) is not None
    }
    if not tops:
        return _by_loss(runs)
    if len({record.measure for record, _ in tops.values()}) > 1:
        return Sweep(runs=runs, reason="The scores were measured in different ways, and are not compared.")
    found = _compared(tops)
    judged = {each.column: each for each in found.columns}
    results = {each.column: AS_GOOD for each in found.same}
    if found.best is not None:
        results[found.best.column] = BEST
    runs = [
        replace(run, score=judged[place].total, result=results.get(place, "")) if place in judged else run
        for run in runs
        if (place := _place(run.name))
    ]
    return Sweep(
        runs=runs, reason=_SCORED if found.reason is None else f"No run is best: {REASONS[found.reason]}."
    )


def worse_runs(folders: Mapping[str, Path]) -> list[str]:
    """The runs whose latest score is worse than that of another run at the same step, beyond the interval."""
    records = dict[str, ScoreRecord]()
    for name, folder in folders.items():
        with suppress(OSError, UserError):
            if record := read_scores(folder / FILE_NAME):
                records[name] = record
    worse = []
    for name, record in records.items():
        step = max((column.step for column in record.columns if column.step), default=BASE_STEP)
        alike = {
            other: (each, step)
            for other, each in records.items()
            if each.measure == record.measure and step in [column.step for column in each.columns]
        }
        if step and len(alike) > 1 and (found := _compared(alike)).best is not None:
            good = [each.column for each in (found.best, *found.same)]
            worse += [] if _place(name) in good else [name]
    return worse


def _compared(steps: Mapping[str, tuple[ScoreRecord, int | None]]) -> Recommendation:
    """The comparison of a step of each run, in a record of their own, whose columns are :func:`_place`."""
    record = next(iter(steps.values()))[0]
    columns = [
        column.model_copy(update={"column": _place(name), "step": None})
        for name, (of_run, step) in steps.items()
        for column in of_run.columns
        if column.step == step
    ]
    return recommend(ScoreRecord(**{**dict(record), "columns": (record.base, *columns)}))


def _place(name: str) -> str:
    """The name of a run's column, which is not that of the base."""
    return f"run {name}"


def _by_loss(runs: Sequence[SweptRun]) -> Sweep:
    lowest = min((run.loss for run in runs if run.loss is not None), default=None)
    if lowest is None:
        return Sweep(runs=runs, reason=_NOT_COMPARED)
    return Sweep(
        runs=[replace(run, result=BEST if run.loss == lowest else "") for run in runs], reason=_BY_LOSS
    )
