"""This file compares the runs of a sweep: what came of each, which is best, and which are as good."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.report.page import duration
from diffsynth_lite.report.run_report import RunReport
from diffsynth_lite.report.scores import REASONS, with_interval
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.scores.recommendation import Interval, recommend
from diffsynth_lite.scores.record import ScoreRecord, joined, read_scores

_BEST, _AS_GOOD, _WORSE = "best", "not distinguishable", "worse"
_BY_SCORES = "Compared by the score of the best step, with an interval at 95 % for all runs together."
_BY_LOSS = (
    "Compared by the lowest loss on held-out data, which has no interval: a small difference may be chance. "
    "validation.scores compares by images."
)
_NOT_COMPARED = "No run is best: none has a loss on held-out data (validation.data) or scores."
_DIFFERENT = "The scores were measured in different ways, and are not compared."
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """A run of a sweep.

    Attributes:
        differs: the settings in which the runs differ, with the values of this one.
        loss: the lowest on held-out data, at ``loss_step``.
        score: Z of its best saved step, ``score_step``, with an interval for all of the runs together.
        message: why it did not start or finish; else empty.
        result: "best", "not distinguishable" from the best one, or by scores "worse"; else empty.
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
    message: str = ""
    result: str = ""

    @property
    def line(self) -> dict[str, str]:
        """Its row of a table, by the names of the columns."""
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


def compare_runs(
    reports: Sequence[RunReport], differs: Sequence[Mapping[str, str]], messages: Sequence[str]
) -> tuple[list[SweptRun], str]:
    """Compare runs by the scores of their best steps, or else by their lowest losses on held-out data.

    Args:
        messages: of each run, why it did not start or finish; else empty.

    Returns:
        The runs, and what the best one was chosen by, or why none is best.
    """
    runs = [_swept(*each) for each in zip(reports, differs, messages, strict=True)]
    tops = [
        (report.name, scores.record, top.step)
        for report in reports
        if (scores := report.scores) and (top := scores.top) and top.step is not None
    ]
    if not tops:
        lowest = min((run.loss for run in runs if run.loss is not None), default=None)
        is_best = [run.loss is not None and run.loss == lowest for run in runs]
        marked = [replace(run, result=_BEST * best) for run, best in zip(runs, is_best, strict=True)]
        return marked, _NOT_COMPARED if lowest is None else _BY_LOSS
    if len({record.measure for _, record, _ in tops}) > 1:
        return runs, _DIFFERENT
    found = recommend(joined(tops[0][1], tops))
    judged = {each.column: each for each in found.columns}
    results = {each.column: _WORSE for each in found.columns if found.best}
    results |= {each.column: _AS_GOOD for each in found.same}
    results |= {found.best.column: _BEST} if found.best else {}
    for place, run in enumerate(runs):
        if one := judged.get(f"{run.name}@{run.score_step}"):
            runs[place] = replace(run, score=one.total, result=results.get(one.column, ""))
    return runs, _BY_SCORES if found.best else f"No run is best: {REASONS[found.reason]}."


def worse_runs(folders: Mapping[str, RunFolder]) -> list[str]:
    """The runs whose latest score is worse than that of another run at the same step, beyond the interval."""
    records = dict[str, ScoreRecord]()
    for name, folder in folders.items():
        with suppress(OSError, UserError):
            records |= {name: record} if (record := read_scores(folder.scores_file)) else {}
    worse = []
    for name, record in records.items():
        step = max(column.step or 0 for column in record.columns)
        alike = [
            (other, each, step)
            for other, each in records.items()
            if each.measure == record.measure and step in [column.step for column in each.columns]
        ]
        found = recommend(joined(record, alike))
        good = [each.column for each in (found.best, *found.same) if each]
        worse += [name] if good and f"{name}@{step}" not in good else []
    return worse


def _swept(report: RunReport, differs: Mapping[str, str], message: str) -> SweptRun:
    points = {name: report.series[name].points for name in report.series}
    loss, loss_step = min(((y, x) for x, y in points.get("validation_loss", ())), default=(None, None))
    top = report.scores.top if report.scores else None
    return SweptRun(
        name=report.name,
        differs=differs,
        state=report.state.name,
        loss=loss,
        loss_step=loss_step,
        score=top.total if top else None,
        score_step=top.step if top else None,
        seconds=report.state.seconds_taken,
        message=message,
        peak_memory_gib=points["peak_memory_gib"][-1][1] if "peak_memory_gib" in points else None,
    )
