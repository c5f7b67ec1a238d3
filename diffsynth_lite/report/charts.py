"""This file says which charts the page has, and which metric each of their lines shows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diffsynth_lite.report.series import Series
from diffsynth_lite.run_folder.metrics import RATE_OF_GROUP

_SMOOTHED = "_smoothed"
_LEARNING_RATE = "learning_rate"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a chart.

    Attributes:
        metric: name in ``metrics.jsonl``, with ``_smoothed`` behind it for the smoothed line.
        label: in the legend.
        is_faint: drawn thin and pale, around the line that matters; left out beside other runs.
    """

    metric: str
    label: str
    is_faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart by training step.

    Attributes:
        name: in the page's script.
        meaning: one sentence for who has never trained anything.
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
        """Whether there is anything to draw."""
        return any(line.metric in series for line in self.lines)

    def summary(self, series: Mapping[str, Series]) -> str:
        """Where each line that is not faint begins and ends, in words; empty where there is none."""
        shown = [line for line in self.lines if not line.is_faint and line.metric in series]
        return "; ".join(_ends(line, series[line.metric], is_named=len(self.lines) > 1) for line in shown)


CHARTS = (
    Chart(
        name="loss",
        title="Loss",
        meaning="How far the model's answers were from what they should have been. It jumps, as every step "
        "draws other pictures and noise; the smoothed line should fall and then level off.",
        lines=(
            Line(metric="loss", label="each logged step", is_faint=True),
            Line(metric=f"loss{_SMOOTHED}", label="smoothed"),
        ),
    ),
    Chart(
        name="audio_loss",
        title="Loss of pictures and sound",
        meaning="The two parts of the loss of clips that are learned with their sound, each by itself. That "
        "of the sound is of the clips that have some, before objective.audio_loss_weight.",
        lines=(
            Line(metric=f"video_loss{_SMOOTHED}", label="of the pictures"),
            Line(metric=f"audio_loss{_SMOOTHED}", label="of the sound"),
        ),
    ),
    Chart(
        name="preservation_loss",
        title="Loss of what is preserved",
        meaning="How far the model has moved on the items on which it shall stay what it was. It begins near "
        "0, and should stay far below the loss.",
        lines=(
            Line(metric="preservation_loss", label="each logged step", is_faint=True),
            Line(metric=f"preservation_loss{_SMOOTHED}", label="smoothed"),
        ),
        from_zero=True,
    ),
    Chart(
        name="fixed_noise_loss",
        title="Loss on fixed noise",
        meaning="The same pictures with the same noise, measured again and again: what changes was learned, "
        "and is no luck. On held-out data a rise means that the LoRA learns its own data by heart.",
        lines=(
            Line(metric="train_fixed_noise_loss", label="on training data"),
            Line(metric="validation_loss", label="on held-out data"),
        ),
    ),
    Chart(
        name="fixed_noise_audio_loss",
        title="Loss of the sound on fixed noise",
        meaning="The part of the loss on fixed noise that is of the sound alone, of clips that have some.",
        lines=(
            Line(metric="train_fixed_noise_loss/audio", label="on training data"),
            Line(metric="validation_loss/audio", label="on held-out data"),
        ),
    ),
    Chart(
        name=_LEARNING_RATE,
        title="Learning rate",
        meaning="How large a change each step may make, as train.learning_rate and its schedule say.",
        lines=(Line(metric=_LEARNING_RATE, label="learning rate"),),
        from_zero=True,
    ),
    Chart(
        name="learned_rate",
        title="Learning rate that was found",
        meaning="What the optimizer makes of the learning rate by itself. It rises from almost nothing in "
        "the first steps, and should then stay.",
        lines=(Line(metric="learned_rate", label="learning rate that was found"),),
        is_log=True,
    ),
    Chart(
        name="grad_norm",
        title="Gradient norm",
        meaning="How strongly a step wanted to change the LoRA, before clipping. Single peaks are normal; a "
        "line that keeps growing often means that the learning rate is too high.",
        lines=(
            Line(metric="grad_norm", label="each logged step", is_faint=True),
            Line(metric=f"grad_norm{_SMOOTHED}", label="smoothed"),
        ),
        from_zero=True,
    ),
    Chart(
        name="samples_per_s",
        title="Speed",
        meaning="Pictures or clips trained on in a second, over all devices. It should be flat.",
        lines=(Line(metric="samples_per_s", label="samples per second"),),
        unit="samples/s",
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


def read_series(rows: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """What the charts' lines show, by name; without those that nothing was logged for.

    Where groups of layers have learning rates, theirs stand in place of ``learning_rate``, which is that of
    the layers without a group, or of none.

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


def charts_of(series: Collection[str]) -> list[Chart]:
    """The charts, of which that of the learning rate has a line more for each group of layers.

    Args:
        series: names of what there is.
    """
    of_groups = [_line_of_group(name) for name in series if name.startswith(RATE_OF_GROUP)]
    return [
        replace(chart, lines=(*chart.lines, *of_groups)) if chart.name == _LEARNING_RATE else chart
        for chart in CHARTS
    ]


def _line_of_group(metric: str) -> Line:
    return Line(metric=metric, label=metric.removeprefix(RATE_OF_GROUP))


def _ends(line: Line, series: Series, *, is_named: bool) -> str:
    (first_step, first), (last_step, last) = series.points[0], series.points[-1]
    name = f"{line.label}: " if is_named else ""
    return f"{name}{first:.4g} at step {first_step}, {last:.4g} at step {last_step}"
