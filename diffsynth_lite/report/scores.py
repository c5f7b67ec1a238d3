"""This file shows the scores of a run: lines by step, a table, and the recommended step in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.charts import Column, Series, Table
from diffsynth_lite.report.judgement import Judgement
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import chosen_copy, lora_copies
from diffsynth_lite.scores.recommendation import (
    FEWEST_PROMPTS,
    Interval,
    JudgedColumn,
    Mark,
    Reason,
    Recommendation,
    recommend,
)
from diffsynth_lite.scores.record import BASE_STEP, FILE_NAME, ScoreRecord, read_scores

_OF_BASE = {"total": 0.5, "new": 0.0, "kept": 1.0, "prompt": 0.0}
"""The scores of the base, by their names in a judged column."""
_COLUMNS = (
    Column(title="step", kind="name"),
    Column(title="score (Z)", kind="count"),
    Column(title="learned (N)", kind="count", is_wide=True),
    Column(title="kept (K)", kind="count", is_wide=True),
    Column(title="prompt", kind="count", is_wide=True),
    Column(title="remarks"),
)
_MARKS: dict[Mark, str] = {
    "from memory": "repeats training images",
    "drifted": "changes images of other prompts more than another step does",
    "not shown to be better than the base": "not shown to be better than the base",
}
REASONS: dict[Reason, str] = {
    "too few prompts": f"there are too few prompts; {FEWEST_PROMPTS} captions of held-out items and as many "
    "prompts without the subject are the fewest",
    "untrained features": "the models that compare the images have not learned from images",
    "no saved step": "no LoRA of a scored step was kept",
    "not shown to be better than the base": "none is shown to be better than the base",
}


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """The scores of a run, and what follows from them.

    Attributes:
        chosen: the step that a person chose; None where nobody did.
    """

    record: ScoreRecord
    found: Recommendation
    saved: frozenset[int]
    chosen: int | None

    @property
    def models(self) -> str:
        """Names of those that compare the images."""
        return redacted(" and ".join(self.record.models))

    @property
    def top(self) -> JudgedColumn | None:
        """The highest of the saved steps, recommended or not."""
        steps = [one for one in self.found.columns if one.step in self.saved]
        return max(steps, key=lambda one: one.total.value, default=None)

    def series(self) -> dict[str, Series]:
        """The lines of the charts, which begin at the base, by metric."""
        steps = [(one.step, one) for one in self.found.columns if one.step is not None]
        places = [BASE_STEP, *(step for step, _ in steps)]
        found = {}
        for name, of_base in _OF_BASE.items() if steps else ():
            intervals: list[Interval] = [getattr(one, name) for _, one in steps]
            values = {"": "value", "_low": "low", "_high": "high"}
            for end, key in values.items():
                line = [of_base, *(getattr(interval, key) for interval in intervals)]
                found[f"score_{name}{end}"] = Series(steps=places, values=line)
        return {name: each for name, each in found.items() if len(each.points) > 1}

    def judgement(self) -> Judgement:
        """The recommended step and those that are as good, or why there is none, in a sentence."""
        best, num_prompts = self.found.best, len(self.record.new_prompts)
        chosen = "" if self.chosen is None else f" Step {self.chosen} was chosen by a person, and is used."
        if best is None:
            assert self.found.reason is not None
            text = f"The scores recommend no step: {REASONS[self.found.reason]}.{chosen}"
            return Judgement(rule="scores", kind="info", text=text)
        others = f" Not distinguishable from it with {num_prompts} prompts: {_named(self.found.same)}."
        marks = "".join(f" It {_MARKS[mark]}." for mark in best.marks)
        return Judgement(
            rule="scores",
            kind="warn" if "from memory" in best.marks else "good",
            text=f"The highest score is that of {_named([best])}."
            f"{others if self.found.same else ''}{marks}{chosen}",
            step=best.step,
        )

    @property
    def table(self) -> Table:
        """A row a step, and below them LoRAs of others."""
        rows = [
            (
                _named([one]),
                *(with_interval(each) for each in (one.total, one.new, one.kept, one.prompt)),
                "; ".join(self._remarks(one)),
            )
            for one in self.found.columns
        ]
        return Table(columns=_COLUMNS, rows=rows)

    def _remarks(self, one: JudgedColumn) -> Iterator[str]:
        if one.step is not None and one.step == self.chosen:
            yield "chosen by a person"
        if one is self.found.best:
            yield "recommended"
        elif one in self.found.same:
            yield "not distinguishable from the recommended one"
        if one.step is not None and one.step not in self.saved:
            yield "no LoRA kept"
        yield from (_MARKS[mark] for mark in one.marks)


def with_interval(interval: Interval) -> str:
    """A value, and half of its interval, such as ``0.41 ± 0.06``."""
    ends = "" if interval.high is None else f" ± {interval.high - interval.value:.2f}"
    return f"{interval.value:.2f}{ends}"


def _named(columns: Sequence[JudgedColumn]) -> str:
    return ", ".join(redacted(one.column) if one.step is None else f"step {one.step}" for one in columns)


def read_run_scores(folder: RunFolder, problems: list[str]) -> RunScores | None:
    """The scores in a run folder; None where there are none, or they cannot be read, which is a problem."""
    path = folder.path / FILE_NAME
    try:
        record = read_scores(path)
    except (OSError, UserError) as error:
        problems.append(redacted(str(error).replace(str(path), path.name)))
        return None
    if record is None:
        return None
    saved = frozenset(copy.step for copy in lora_copies(folder.checkpoints_folder))
    try:
        choice = chosen_copy(folder)
    except UserError as error:
        problems.append(redacted(str(error)))
        choice = None
    return RunScores(
        record=record,
        found=recommend(record, saved),
        saved=saved,
        chosen=choice.step if choice is not None else None,
    )


def score_row(scores: Sequence[RunScores | None]) -> Mapping[str, list[str]]:
    """The row of a page of several runs: the score of the best saved step of each."""
    tops = [None if each is None else each.top for each in scores]
    differ = len({each.record.measure for each in scores if each is not None}) > 1
    name = "score of the best step" + (", each measured differently" if differ else "")
    return {name: [f"{with_interval(top.total)} at {_named([top])}" if top else "" for top in tops]}
