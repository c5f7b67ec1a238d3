"""This file compares runs: the settings in which they differ, their results, and their previews."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from diffsynth_lite.media import evenly_spread
from diffsynth_lite.report.previews import Preview
from diffsynth_lite.report.record import as_yaml
from diffsynth_lite.report.run_report import RunReport

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
"""Metrics whose last value is shown."""
_LOWEST = {"lowest loss on held-out data": "validation_loss"}

Rows = dict[str, list[str]]
"""By what a row shows, a value for each run; empty where the run has none."""


@dataclass(frozen=True, kw_only=True)
class SharedPrompt:
    """The previews that runs generated of one prompt.

    Attributes:
        steps: at which any of them has a preview.
    """

    prompt: str
    steps: Sequence[int]
    previews: Sequence[Sequence[Preview | None]]


def results(runs: Sequence[RunReport]) -> Rows:
    """The last values of the runs' metrics, and the lowest of a loss that may rise again."""
    measures = [(name, metric, _last) for name, metric in _LAST.items()]
    measures += [(name, metric, _lowest) for name, metric in _LOWEST.items()]
    rows = {
        name: [measure(run.series[metric].points) if metric in run.series else "" for run in runs]
        for name, metric, measure in measures
    }
    return {name: values for name, values in rows.items() if any(values)}


def _last(points: Sequence[tuple[int, float]]) -> str:
    return f"{points[-1][1]:.4g}"


def _lowest(points: Sequence[tuple[int, float]]) -> str:
    value, step = min((value, step) for step, value in points)
    return f"{value:.4g} at step {step}"


def differing_settings(settings: Sequence[str]) -> Rows:
    """The settings in which runs differ, by dotted key.

    Args:
        settings: of each run, as yaml; empty for a run that left none.
    """
    flat = [dict(_flat(yaml.safe_load(text) or {})) for text in settings]
    keys = dict.fromkeys(key for each in flat for key in each if key not in _OF_THE_PLACE)
    rows = {key: [each.get(key, "") for each in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", as_yaml(value)


def shared_prompts(runs: Sequence[RunReport]) -> list[SharedPrompt]:
    """The prompts of which two runs or more have previews, in the order of the first of them."""
    by_prompt: dict[str, list[dict[int, Preview]]] = {}
    for place, run in enumerate(runs):
        for prompt in run.prompts:
            of_runs = by_prompt.setdefault(prompt.prompt, [{} for _ in runs])
            of_runs[place] = {preview.step: preview for preview in prompt.previews}
    shared = {prompt: of_runs for prompt, of_runs in by_prompt.items() if sum(map(bool, of_runs)) > 1}
    return [_shared_prompt(prompt, of_runs) for prompt, of_runs in shared.items()]


def _shared_prompt(prompt: str, of_runs: Sequence[Mapping[int, Preview]]) -> SharedPrompt:
    """With as many steps as fit side by side; the last of each run is among them."""
    last = {max(by_step) for by_step in of_runs if by_step}
    others = sorted({step for by_step in of_runs for step in by_step} - last)
    steps = sorted(last | set(evenly_spread(others, max(2, _MAX_STEPS - len(last)))))
    previews = [[by_step.get(step) for step in steps] for by_step in of_runs]
    return SharedPrompt(prompt=prompt, steps=steps, previews=previews)
