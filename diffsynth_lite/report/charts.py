"""This file turns rows of metrics into the lines of charts, and defines the charts and tables of the page."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from diffsynth_lite.run_folder.metrics import RATE_OF_GROUP, STEP_PARTS, STEP_SECONDS

_MAX_POINTS = 1200
"""Points of a line; a screen shows no more."""
_SMOOTHED_OVER = 1 / 20
"""Decay length of a smoothed line as a part of the rows, so that runs of any length look similar."""
_MIN_SMOOTHED_ROWS = 5
_TOO_LARGE = 1e300
"""Larger than any number of a run; json has integers that do not fit into a float."""
_SMOOTHED = "_smoothed"
_LEARNING_RATE = "learning_rate"

Kind = Literal[
    "text",
    "name",  # a text that is not wrapped
    "number",
    "count",
    "ratio",  # a number with two decimals
    "change",  # a ratio as a signed percentage
    "percent",  # a part as a percentage
    "share",  # a part as a percentage, with a bar
    "key",  # of a setting
    "link",  # to a file of the run
    "noted",  # a text and a note
    "folded",  # a text, and versions to unfold
    "lines",  # texts below each other
    "moment",  # seconds since 1970 or None, and a note
    "image",  # a data URL, or None
    "item",  # name, size and caption
    "bar",  # a number, with a bar
    "trend",  # a change, with a colour
    "course",  # numbers as a line
]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart.

    Attributes:
        steps: ascending.
        values: one a step; None where the logged value is not a number.
    """

    steps: Sequence[int]
    values: Sequence[float | None]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], metric: str) -> "Series":
        """The logged values of a metric; of two rows of one step the later one counts."""
        by_step = {row["step"]: as_number(row[metric]) for row in rows if metric in row and _has_step(row)}
        steps = sorted(by_step)
        return cls(steps=steps, values=[by_step[step] for step in steps])

    @property
    def points(self) -> list[tuple[int, float]]:
        """Steps and values, without those that are not numbers."""
        return [
            (step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None
        ]

    def smoothed(self) -> "Series":
        """The exponential moving average of the values, without bias towards 0 at the start."""
        kept = 1 - 1 / max(_MIN_SMOOTHED_ROWS, len(self.steps) * _SMOOTHED_OVER)
        total, weight = 0.0, 0.0
        steps, values = [], []
        for step, value in self.points:
            total, weight = kept * total + value, kept * weight + 1
            steps.append(step)
            values.append(total / weight)
        return Series(steps=steps, values=values)

    def thinned(self) -> "Series":
        """At most as many points as a screen shows, with the lowest and the highest of each stretch."""
        if len(self.steps) <= _MAX_POINTS:
            return self
        stretch = math.ceil(2 * len(self.steps) / _MAX_POINTS)
        places = [
            place
            for start in range(0, len(self.steps), stretch)
            for place in _extremes(self.values, range(start, min(start + stretch, len(self.steps))))
        ]
        return Series(
            steps=[self.steps[place] for place in places], values=[self.values[place] for place in places]
        )

    def document(self) -> list[list[Any]]:
        """Steps and values as the page's script reads them, to six digits."""
        values = [None if value is None else float(f"{value:.6g}") for value in self.values]
        return [list(self.steps), values]


def as_number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _TOO_LARGE:
        return None
    return value


def _has_step(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("step"), int) and not isinstance(row["step"], bool)


def _extremes(values: Sequence[float | None], places: range) -> Iterator[int]:
    """Indices of the lowest and the highest value, ascending."""
    finite = [(value, place) for place in places if (value := values[place]) is not None]
    yield from sorted({min(finite)[1], max(finite)[1]} if finite else {places[0]})


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        title: empty in a table without a heading.
        kind: of its cells; decides how the template shows them.
        is_wide: whether a phone leaves it out.
        sort: its name in the address of a page that is sorted by it; empty where it cannot be.
    """

    title: str = ""
    kind: Kind = "text"
    is_wide: bool = False
    sort: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page.

    Attributes:
        rows: one cell for each column; a missing number is None.
        summary: a line above the table.
    """

    columns: Sequence[Column] = ()
    rows: Sequence[Sequence[Any]] = ()
    summary: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows or self.summary)


NO_TABLE = Table()


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Attributes:
        metric: name in ``metrics.jsonl``, with ``_smoothed`` after it for the smoothed line.
        label: in the legend.
        is_faint: thin and pale, around the line that matters; left out next to other runs.
    """

    metric: str
    label: str
    is_faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart by training step.

    Attributes:
        name: in the page's script.
        meaning: one sentence for a reader who has never trained anything.
        unit: of its values; empty where they have none.
        from_zero: whether its axis begins at 0, so that heights compare.
        is_log: whether its axis is logarithmic, as values differ by powers of ten.
    """

    name: str
    title: str
    meaning: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False
    is_log: bool = False

    def is_shown(self, series: Mapping[str, Series]) -> bool:
        """Whether any of its lines has values."""
        return any(line.metric in series for line in self.lines)

    def summary(self, series: Mapping[str, Series]) -> str:
        """First and last value of each line that is not faint, in words; empty if there is no such line."""
        ends = []
        for line in self.lines:
            if not line.is_faint and line.metric in series:
                points = series[line.metric].points
                (first_step, first), (last_step, last) = points[0], points[-1]
                name = f"{line.label}: " if len(self.lines) > 1 else ""
                ends.append(f"{name}{first:.4g} at step {first_step}, {last:.4g} at step {last_step}")
        return "; ".join(ends)


def _score(name: str, title: str, meaning: str) -> Chart:
    """The chart of a score, with both ends of its interval."""
    ends = [Line(metric=f"{name}_{end}", label=f"{end} end", is_faint=True) for end in ("low", "high")]
    meaning += " The pale lines are the ends of its interval, at 95 % for all steps together."
    return Chart(
        name=name, title=title, meaning=meaning, lines=(Line(metric=f"{name}_value", label="score"), *ends)
    )


def _raw_and_smoothed(metric: str) -> tuple[Line, Line]:
    return (
        Line(metric=metric, label="each logged step", is_faint=True),
        Line(metric=f"{metric}{_SMOOTHED}", label="smoothed"),
    )


CHARTS = (
    Chart(
        name="loss",
        title="Loss",
        meaning="How far the model's answers were from what they should have been. It jumps, as every step "
        "draws other images and noise; the smoothed line should fall and then level off.",
        lines=_raw_and_smoothed("loss"),
    ),
    Chart(
        name="audio_loss",
        title="Loss of images and audio",
        meaning="The two parts of the loss of clips that are trained on with their audio. The part of the "
        "audio is over the clips that have audio, before objective.audio_loss_weight.",
        lines=(
            Line(metric=f"video_loss{_SMOOTHED}", label="of the images"),
            Line(metric=f"audio_loss{_SMOOTHED}", label="of the audio"),
        ),
    ),
    Chart(
        name="slider_loss",
        title="Loss of both ends",
        meaning="The loss of a slider at strengths 1 and -1. One that stays above the other is of an end "
        "that is harder to reach from the neutral prompts.",
        lines=(
            Line(metric=f"positive_loss{_SMOOTHED}", label="at strength 1"),
            Line(metric=f"negative_loss{_SMOOTHED}", label="at strength -1"),
        ),
    ),
    Chart(
        name="preservation_loss",
        title="Loss of what is preserved",
        meaning="How far the model has moved on the items on which it should stay as it was. It begins near "
        "0, and should stay far below the loss.",
        lines=_raw_and_smoothed("preservation_loss"),
        from_zero=True,
    ),
    Chart(
        name="fixed_noise_loss",
        title="Loss on fixed noise",
        meaning="The same images with the same noise, measured again and again: a change is learned, and "
        "not luck. On held-out data a rise means that the LoRA overfits.",
        lines=(
            Line(metric="train_fixed_noise_loss", label="on training data"),
            Line(metric="validation_loss", label="on held-out data"),
        ),
    ),
    Chart(
        name="fixed_noise_audio_loss",
        title="Loss of the audio on fixed noise",
        meaning="The audio's part of the loss on fixed noise, over the clips that have audio.",
        lines=(
            Line(metric="train_fixed_noise_loss/audio", label="on training data"),
            Line(metric="validation_loss/audio", label="on held-out data"),
        ),
    ),
    _score("score_total", "Score (Z)", "The mean of what was learned and what was kept; 0.5 is the base."),
    _score(
        "score_new",
        "Learned (N)",
        "How much more new images are like held-out images of their own caption than like those of others: 0 "
        "as with the base, 1 as the held-out images are among themselves.",
    ),
    _score(
        "score_kept",
        "Kept (K)",
        "How much images of prompts without the subject are still those of the base: 1 is the same image, 0 "
        "is as far from it as an image of another prompt.",
    ),
    _score(
        "score_prompt",
        "Prompt",
        "How much better images fit their prompt than those of the base do, by a model of images and texts.",
    ),
    Chart(
        name=_LEARNING_RATE,
        title="Learning rate",
        meaning="How large a change each step may make, by train.learning_rate and its schedule.",
        lines=(Line(metric=_LEARNING_RATE, label="learning rate"),),
        from_zero=True,
    ),
    Chart(
        name="learned_rate",
        title="Learning rate that was found",
        meaning="The learning rate that the optimizer found by itself. It rises from almost nothing in "
        "the first steps, and should then stay.",
        lines=(Line(metric="learned_rate", label="learning rate that was found"),),
        is_log=True,
    ),
    Chart(
        name="grad_norm",
        title="Gradient norm",
        meaning="How strongly a step wanted to change the LoRA, before clipping. Single peaks are normal; a "
        "line that keeps growing often means that the learning rate is too high.",
        lines=_raw_and_smoothed("grad_norm"),
        from_zero=True,
    ),
    Chart(
        name="samples_per_s",
        title="Speed",
        meaning="Images or clips trained on in a second, over all devices. It should be flat.",
        lines=(Line(metric="samples_per_s", label="samples per second"),),
        unit="samples/s",
        from_zero=True,
    ),
    Chart(
        name="step_seconds",
        title="Time of a step",
        meaning="How the time of a step divides. Time between steps is that of previews, evaluations and "
        "checkpoints, and is shared out over the steps since the point before. Data should take almost none.",
        lines=tuple(Line(metric=f"{STEP_SECONDS}{part}", label=label) for part, label in STEP_PARTS.items()),
        unit="s",
        from_zero=True,
    ),
    Chart(
        name="peak_memory_gib",
        title="Memory",
        meaning="The most memory used so far: of the GPU, or of the whole program where there is none.",
        lines=(Line(metric="peak_memory_gib", label="peak"),),
        unit="GiB",
        from_zero=True,
    ),
    Chart(
        name="update",
        title="Update of the layers",
        meaning="How much the LoRA changes the weights that it is added to; each number on the left is ten "
        "times the one below. Layers at 0 learn nothing, and are named further down.",
        lines=(
            Line(metric="update_largest", label="largest", is_faint=True),
            Line(metric="update_median", label="median"),
            Line(metric="update_smallest", label="smallest above 0", is_faint=True),
        ),
        unit="% of the weights",
        is_log=True,
    ),
)


def charts_of(series: Collection[str]) -> list[Chart]:
    """The charts of metrics with these names; that of the learning rate has a line for each layer group."""
    of_groups = [_line_of_group(name) for name in series if name.startswith(RATE_OF_GROUP)]
    return [
        replace(chart, lines=(*chart.lines, *of_groups)) if chart.name == _LEARNING_RATE else chart
        for chart in CHARTS
    ]


def read_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """The charts' lines by name; without metrics that were not logged.

    Where groups of layers have learning rates, theirs replace ``learning_rate``, which is that of the layers
    without a group, or of none.

    Args:
        rows: of ``metrics.jsonl``.
    """
    series = {}
    of_groups = dict.fromkeys(name for row in rows for name in row if name.startswith(RATE_OF_GROUP))
    replaced = {_LEARNING_RATE} if of_groups else set()
    lines = [line for chart in CHARTS for line in chart.lines if line.metric not in replaced]
    for line in [*lines, *map(_line_of_group, of_groups)]:
        raw = Series.of(rows, line.metric.removesuffix(_SMOOTHED))
        series[line.metric] = raw.smoothed() if line.metric.endswith(_SMOOTHED) else raw
    return {name: each.thinned() for name, each in series.items() if each.points}


def time_shares(rows: Sequence[Mapping[str, Any]]) -> str:
    """How all the time since the first logged step divides, as a sentence; empty where it was not logged."""
    totals, before = dict.fromkeys(STEP_PARTS, 0.0), 0
    for row in (row for row in rows if f"{STEP_SECONDS}forward" in row and _has_step(row)):
        num_steps, before = row["step"] - before, row["step"]
        if row["step"] > 1:  # the first step prepares what the others use
            for part in totals:
                totals[part] += num_steps * (as_number(row.get(f"{STEP_SECONDS}{part}")) or 0.0)
    whole = sum(totals.values())
    longest = sorted(totals, key=lambda part: -totals[part]) if whole else []
    return ", ".join(f"{STEP_PARTS[part]} {100 * totals[part] / whole:.0f} %" for part in longest)


def layer_updates(row: Mapping[str, Any]) -> dict[str, float]:
    """The update of each layer in a row of ``layers.jsonl``, without those that are not numbers."""
    updates = row.get("updates")
    if not isinstance(updates, dict):
        return {}
    return {name: value for name, update in updates.items() if (value := as_number(update)) is not None}


def update_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Largest, median and smallest update by step, in % of the weights; layers at 0 are left out."""
    measures: dict[str, Callable[[Sequence[float]], float]]
    measures = {"update_largest": max, "update_median": median, "update_smallest": min}
    found = [
        {"step": row.get("step"), **{name: 100 * measure(changed) for name, measure in measures.items()}}
        for row in rows
        if (changed := [update for update in layer_updates(row).values() if update > 0])
    ]
    series = {name: Series.of(found, name).thinned() for name in measures}
    return {name: each for name, each in series.items() if each.points}


def _line_of_group(metric: str) -> Line:
    return Line(metric=metric, label=metric.removeprefix(RATE_OF_GROUP))
