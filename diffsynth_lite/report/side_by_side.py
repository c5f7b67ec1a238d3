"""This file sets runs side by side: in what their settings differ, what came of each, and what each drew."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from diffsynth_lite.media import evenly_spread
from diffsynth_lite.report.previews import Preview
from diffsynth_lite.report.record import as_yaml
from diffsynth_lite.report.run_report import RunReport
from diffsynth_lite.report.series import Series

_OF_THE_PLACE = ("output.dir", "logging.run_name")
"""Settings that differ between any two runs, and change neither."""
_MAX_STEPS = 8
_LAST = {
    "loss, smoothed": "loss_smoothed",
    "loss on fixed noise": "train_fixed_noise_loss",
    "loss on held-out data": "validation_loss",
    "samples per second": "samples_per_s",
    "peak memory in GiB": "peak_memory_gib",
}
"""Metrics whose last value is told."""
_LOWEST = {"lowest loss on held-out data": "validation_loss"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Something that is told of each run.

    Attributes:
        name: what it is.
        values: one a run, in their order; empty where a run has none.
    """

    name: str
    values: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class DrawnPrompt:
    """What runs drew of one prompt.

    Attributes:
        steps: at which any of them drew it.
        drawn: for each run its preview at each of the steps, or None.
    """

    prompt: str
    steps: Sequence[int]
    drawn: Sequence[Sequence[Preview | None]]


@dataclass(frozen=True, kw_only=True)
class SideBySide:
    """What the page of several runs says besides their charts.

    Attributes:
        results: what came of each.
        settings: those in which they differ.
        prompts: those that two runs or more drew.
    """

    results: Sequence[Row]
    settings: Sequence[Row]
    prompts: Sequence[DrawnPrompt]


def side_by_side(runs: Sequence[RunReport]) -> SideBySide:
    """Set runs beside each other."""
    return SideBySide(
        results=results(runs),
        settings=differing_settings([run.settings for run in runs]),
        prompts=drawn_prompts(runs),
    )


def results(runs: Sequence[RunReport]) -> list[Row]:
    """The last values of the runs' metrics, and the lowest of a loss that may rise again."""
    told = [(name, metric, _last) for name, metric in _LAST.items()]
    told += [(name, metric, _lowest) for name, metric in _LOWEST.items()]
    rows = [
        Row(name=name, values=[tell(run.series.get(metric)) for run in runs]) for name, metric, tell in told
    ]
    return [row for row in rows if any(row.values)]


def differing_settings(settings: Sequence[str]) -> list[Row]:
    """The settings in which runs differ, by dotted key.

    Args:
        settings: of each run, as yaml; empty of a run that left none.
    """
    flat = [dict(_flat(yaml.safe_load(text) or {})) for text in settings]
    keys = dict.fromkeys(key for each in flat for key in each if key not in _OF_THE_PLACE)
    rows = [Row(name=key, values=[each.get(key, "") for each in flat]) for key in keys]
    return [row for row in rows if len(set(row.values)) > 1]


def drawn_prompts(runs: Sequence[RunReport]) -> list[DrawnPrompt]:
    """The prompts that two runs or more drew, in the order of the first that did."""
    by_prompt: dict[str, list[dict[int, Preview]]] = {}
    for place, run in enumerate(runs):
        for prompt in run.prompts:
            drawn = by_prompt.setdefault(prompt.prompt, [{} for _ in runs])
            drawn[place] = {preview.step: preview for preview in prompt.previews}
    return [_drawn_prompt(prompt, drawn) for prompt, drawn in by_prompt.items() if sum(map(bool, drawn)) > 1]


def _drawn_prompt(prompt: str, drawn: Sequence[Mapping[int, Preview]]) -> DrawnPrompt:
    """One with as many steps as stand side by side; the last of each run is among them."""
    last = {max(by_step) for by_step in drawn if by_step}
    others = sorted({step for by_step in drawn for step in by_step} - last)
    steps = sorted(last | set(evenly_spread(others, max(2, _MAX_STEPS - len(last)))))
    return DrawnPrompt(
        prompt=prompt, steps=steps, drawn=[[by_step.get(step) for step in steps] for by_step in drawn]
    )


def _last(series: Series | None) -> str:
    return f"{series.points[-1][1]:.4g}" if series and series.points else ""


def _lowest(series: Series | None) -> str:
    if not series or not series.points:
        return ""
    value, step = min((value, step) for step, value in series.points)
    return f"{value:.4g} at step {step}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", as_yaml(value)
