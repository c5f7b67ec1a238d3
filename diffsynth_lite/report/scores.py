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
from diffsynth_lite.scores.record import BASE_STEP, ScoreRecord, joined, read_scores

_OF_BASE = {"total": 0.5, "new": 0.0, "kept": 1.0, "prompt": 0.0}
"""The scores of the base, by their names in a judged column."""
_COLUMNS = (
    *(Column(title="step", kind="name"), Column(title="score (Z)", kind="count")),
    *(Column(title=title, kind="count", is_wide=True) for title in ("learned (N)", "kept (K)", "prompt")),
    Column(title="remarks"),
)
MARKS: dict[Mark, str] = {
    "from memory": "repeats training images",
    "drifted": "changes images of prompts without the subject",
    "not shown to be better than the base": "not shown to be better than the base",
}
REASONS: dict[Reason | None, str] = {
    "too few prompts": f"it takes {FEWEST_PROMPTS} captions of held-out items, and as many prompts without "
    "the subject",
    "no saved step": "no LoRA of a scored step was kept",
    "not shown to be better than the base": "the one with the highest score is not shown to be better than "
    "the base",
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
    def top(self) -> JudgedColumn | None:
        """The highest of the saved steps, recommended or not."""
        steps = [one for one in self.found.columns if one.step in self.saved]
        return max(steps, key=lambda one: one.total.value, default=None)

    def series(self) -> dict[str, Series]:
        """The lines of the charts, which begin at the base, by metric; none before there is a scored step."""
        judged = {one.step: one for one in self.found.columns if one.step is not None}
        return {
            f"score_{name}_{end}": Series(
                steps=[BASE_STEP, *judged],
                values=[of_base, *(getattr(getattr(one, name), end) for one in judged.values())],
            )
            for name, of_base in _OF_BASE.items()
            for end in ("value", "low", "high")
            if judged
        }

    def judgement(self) -> Judgement:
        """The recommended step and those that are as good, or why there is none, in sentences."""
        best, same, num_prompts = self.found.best, self.found.same, len(self.record.new_prompts)
        is_copy = best is not None and "from memory" in best.marks
        if best is None:
            sentences = [f"The scores recommend no step: {REASONS[self.found.reason]}."]
        else:
            sentences = [f"The highest score is that of {_named([best])}."]
            if same:
                sentences.append(f"Not distinguishable from it with {num_prompts} prompts: {_named(same)}.")
            sentences += [f"It {MARKS[mark]}." for mark in best.marks]
        if self.chosen is not None:
            sentences.append(f"Step {self.chosen} was chosen by a person, and is used.")
        return Judgement(
            rule="scores",
            kind="warn" if is_copy else "good" if best else "info",
            text=" ".join(sentences),
            step=best.step if best else None,
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
        yield from (MARKS[mark] for mark in one.marks)


def with_interval(interval: Interval) -> str:
    """A value, and half of its interval, such as ``0.41 ± 0.06``."""
    ends = "" if interval.high is None else f" ± {interval.high - interval.value:.2f}"
    return f"{interval.value:z.2f}{ends}"


def _named(columns: Sequence[JudgedColumn]) -> str:
    return ", ".join(redacted(one.column) if one.step is None else f"step {one.step}" for one in columns)


def read_run_scores(folder: RunFolder, problems: list[str]) -> RunScores | None:
    """The scores in a run folder; None where there are none, or they cannot be read, which is a problem."""
    try:
        record = read_scores(folder.scores_file)
        choice = chosen_copy(folder) if record else None
    except (OSError, UserError) as error:
        problems.append(redacted(str(error).replace(f"{folder.path}/", "")))
        return None
    if record is None:
        return None
    saved = frozenset(copy.step for copy in lora_copies(folder.checkpoints_folder))
    return RunScores(
        record=record.model_copy(update={"models": redacted(record.models)}),
        found=recommend(record, saved),
        saved=saved,
        chosen=choice.step if choice is not None else None,
    )


def compared_scores(scores: Mapping[str, RunScores]) -> RunScores:
    """The scores of a run; of several, whose measure is the same, those of all of their kept steps together.

    Args:
        scores: by the names that the runs have in front of their steps.
    """
    first, *others = scores.values()
    if not others:
        return first
    steps = [(name, each.record, step) for name, each in scores.items() for step in sorted(each.saved)]
    record = joined(first.record, steps)
    for column in first.record.columns:
        record = record.with_column(column) if column.step is None else record
    return RunScores(record=record, found=recommend(record), saved=frozenset(), chosen=None)


def score_row(scores: Sequence[RunScores | None]) -> dict[str, list[str]]:
    """The row of a page of several runs: the score of the best saved step of each."""
    tops = [None if each is None else each.top for each in scores]
    differ = len({each.record.measure for each in scores if each is not None}) > 1
    name = "score of the best step" + (", each measured differently" if differ else "")
    return {name: [f"{with_interval(top.total)} at {_named([top])}" if top else "" for top in tops]}
