"""This file makes the page of a run, or of several side by side.

In a run folder it is one HTML file that fetches nothing. While a run continues, it is written again and
again, for a hundredth of the run's time at most. A server shows the same page, with its styles and scripts
as files.
"""

import base64
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from diffsynth_lite.errors import DifferentRunError
from diffsynth_lite.files import replacing
from diffsynth_lite.media import evenly_spread
from diffsynth_lite.report.charts import charts_of
from diffsynth_lite.report.previews import Preview, embedded
from diffsynth_lite.report.record import as_yaml
from diffsynth_lite.report.run_report import RunReport, read_run
from diffsynth_lite.report.scores import score_row
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import flat_settings

logger = logging.getLogger(__name__)

_WRITE_EVERY_S = 20.0
_WAITED_MULTIPLE = 100
"""Pause before the next page, in times of the last one's duration: its files grow with the run."""
SCRIPTS = ("live.js", "vendor/uPlot.iife.min.js", "compare.js", "report.js")
STYLES = ("vendor/uPlot.min.css", "style.css", "report.css")
"""Files of this folder that a page needs, in this order."""
_TEMPLATES = ("page.html", "icons.html", "run.html", "several.html")
_HEAD_BYTES = 1000
"""Start of a page, with the mark of the version that wrote it."""
_OF_THE_PLACE = ("output.dir", "logging.run_name")
"""Settings that differ between any two runs without an effect on them."""
_MAX_STEPS = 8
_LAST = {
    "loss, smoothed": "loss_smoothed",
    "loss on fixed noise": "train_fixed_noise_loss",
    "loss on held-out data": "validation_loss",
    "samples per second": "samples_per_s",
    "peak memory in GiB": "peak_memory_gib",
}
"""Metrics whose last value is shown."""
_LOWEST = "validation_loss"
"""The metric whose lowest value is shown."""

Rows = dict[str, list[str]]
"""Name of a row to one value for each run; empty if the run has none."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server puts into a page, whose styles and scripts it has below ``/static/`` by their last name.

    Attributes:
        navigation: in place of the index of the page.
        state: in place of the state of the run, in words.
        lead: below the name of the run.
        actions: next to it.
        notes: above the numbers of the run.
        foot: below them.
        early_scripts: that run before anything is shown.
    """

    navigation: Markup | None = None
    state: str | None = None
    lead: Markup | None = None
    actions: Markup | None = None
    notes: Markup | None = None
    foot: Markup | None = None
    styles: Sequence[str] = STYLES
    scripts: Sequence[str] = SCRIPTS
    early_scripts: Sequence[str] = ()


class ReportWriter:
    """Writes the page of a run now and then, and once when the run has ended.

    No error of a page may end the run: it is logged as one warning.

    Args:
        is_main: whether this process writes; the others write nothing.
        clock: returns seconds.
    """

    def __init__(self, folder: Path, *, is_main: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._is_main = is_main
        self._clock = clock
        self._due_at = clock() + _WRITE_EVERY_S
        self._failed = False

    def refresh(self) -> None:
        """Write the page, unless it was just written."""
        if self._clock() >= self._due_at:
            self._write()

    def restore(self) -> None:
        """Write the page of an ended run again if it was removed or is of another version."""
        try:
            with RunFolder(self._folder).report_file.open("rb") as file:
                is_current = _generator().encode() in file.read(_HEAD_BYTES)
        except OSError:
            is_current = False
        if not is_current:
            self._write()

    @contextmanager
    def concluded(self) -> Iterator[None]:
        """Scope of a run, after which the page shows how it ended.

        A run that turns out to be a different one leaves the page as it was.
        """
        try:
            yield
        except DifferentRunError:
            raise
        except BaseException:
            self._write()
            raise
        self._write()

    def _write(self) -> None:
        if not self._is_main or not self._folder.is_dir():
            return
        started_at = self._clock()
        try:
            write_report(self._folder)
        except Exception as error:  # no error of a page may end the run: a full disk, an unexpected file
            if not self._failed:
                logger.warning(
                    "The page of the run could not be written; nothing else is affected: %s",
                    error,
                    exc_info=not isinstance(error, OSError),
                )
            self._failed = True
        now = self._clock()
        self._due_at = now + max(_WRITE_EVERY_S, _WAITED_MULTIPLE * (now - started_at))


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder, whole or not at all; returns its path."""
    path = RunFolder(folder).report_file
    write_page(path, [read_run(folder)])
    return path


def write_page(path: Path, runs: Sequence[RunReport]) -> None:
    """Write the page of runs, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(render(runs), encoding="utf-8")


def render(runs: Sequence[RunReport], *, served: Served | None = None) -> str:
    """The page of one run, or of several side by side with their lines in the same charts.

    Nothing but the scripts of this package runs in it, whatever captions, prompts and names hold: these are
    escaped, and the content security policy of the page or of its server allows no other script and no other
    origin.

    Args:
        served: of a page that a server shows: previews are files of the server, and the page polls it for
            changes. None: previews are embedded while the page stays small, and the page of a running run
            reloads now and then.
    """
    charts = charts_of(dict.fromkeys(name for run in runs for name in run.series))
    compared = None
    if len(runs) > 1:
        compared = {
            "results": results(runs),
            "settings": differing_settings(settings := [run.settings for run in runs]),
            "same": same_settings(settings),
            "prompts": (shared := shared_prompts(runs)),
            "has_previews": any(run.prompts for run in runs),
            "has_own_prompts": len(shared) < len({each.prompt for run in runs for each in run.prompts}),
        }
    is_running = any(run.state.is_running for run in runs)
    page = (
        _environment()
        .get_template("page.html")
        .render(
            runs=runs,
            media=[{} if served else embedded(run.folder, run.prompts, share=1 / len(runs)) for run in runs],
            compared=compared,
            served=served,
            renewal="ask" if served else "reload" if is_running else "none",
            run_page="" if served else "report.html",
            charts=[chart for chart in charts if any(chart.is_shown(run.series) for run in runs)],
            data={
                "runs": [
                    {"name": run.name, "series": {name: each.document() for name, each in run.series.items()}}
                    for run in runs
                ],
                "charts": {chart.name: asdict(chart) for chart in charts},
            },
            generator=_generator(),
            written_at=time.time(),
            **(_linked(served) if served else _inline()),
        )
    )
    # Names of files and texts of json may hold surrogates, which UTF-8 has not.
    return page.encode(errors="replace").decode()


def _inline() -> dict[str, Any]:
    """Styles and scripts as texts, with the hashes by which the page's policy allows these scripts."""
    scripts = [_resource(name) for name in SCRIPTS]
    hashes = [hashlib.sha256(script.encode()).digest() for script in scripts]
    return {"styles": [_resource(name) for name in STYLES], "scripts": scripts, "script_hashes": hashes}


def _linked(served: Served) -> dict[str, Any]:
    """Styles and scripts as addresses."""
    names = {"styles": served.styles, "scripts": served.scripts, "early_scripts": served.early_scripts}
    return {kind: [f"/static/{Path(name).name}" for name in found] for kind, found in names.items()}


@cache
def _generator() -> str:
    """The mark in a page of the templates and scripts that made it."""
    made_of = "".join(map(_resource, (*_TEMPLATES, *SCRIPTS, *STYLES)))
    return f"diffsynth_lite {hashlib.sha256(made_of.encode()).hexdigest()[:16]}"


@cache
def _environment() -> Environment:
    """Cached with its compiled templates, which take three times as long as a page."""
    environment = Environment(
        loader=PackageLoader("diffsynth_lite.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    return environment


def duration(seconds: float) -> str:
    """A time span in its two largest units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _resource(name: str) -> str:
    return files("diffsynth_lite.report").joinpath(name).read_text(encoding="utf-8")


def _sparkline(values: Sequence[float]) -> str:
    """Points of a line in a box of 80 x 20, the largest value on top."""
    low, high = min(values), max(values)
    height = 16 / (high - low) if high > low else 0.0
    width = 78 / max(1, len(values) - 1)
    return " ".join(
        f"{1 + place * width:.1f},{18 - (value - low) * height:.1f}" for place, value in enumerate(values)
    )


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
    """The last values of the runs' metrics, the lowest validation loss, and the highest score."""

    def points(run: RunReport, metric: str) -> list[tuple[int, float]]:
        return run.series[metric].points if metric in run.series else []

    rows = {
        name: [f"{found[-1][1]:.4g}" if (found := points(run, metric)) else "" for run in runs]
        for name, metric in _LAST.items()
    }
    lowest = [min(((value, step) for step, value in points(run, _LOWEST)), default=None) for run in runs]
    rows["lowest loss on held-out data"] = [
        "" if found is None else f"{found[0]:.4g} at step {found[1]}" for found in lowest
    ]
    rows |= score_row([run.scores for run in runs])
    return {name: values for name, values in rows.items() if any(values)}


def differing_settings(settings: Sequence[str]) -> Rows:
    """The settings in which runs differ, by dotted key.

    Args:
        settings: of each run, as yaml; empty for a run without them.
    """
    return {key: values for key, values in _rows(settings).items() if len(set(values)) > 1}


def same_settings(settings: Sequence[str]) -> dict[str, str]:
    """The settings that all runs have in common, with their values, by dotted key."""
    return {key: values[0] for key, values in _rows(settings).items() if len(set(values)) == 1}


def _rows(settings: Sequence[str]) -> Rows:
    flat = [_flat_settings(text) for text in settings]
    keys = dict.fromkeys(key for each in flat for key in each if key not in _OF_THE_PLACE)
    return {key: [each.get(key, "") for each in flat] for key in keys}


@lru_cache(maxsize=64)
def _flat_settings(text: str) -> Mapping[str, str]:
    return {name: as_yaml(value) for name, value in flat_settings(yaml.safe_load(text) or {}).items()}


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
    """The previews with as many steps as fit side by side, including the last one of each run."""
    last = {max(by_step) for by_step in of_runs if by_step}
    others = sorted({step for by_step in of_runs for step in by_step} - last)
    steps = sorted(last | set(evenly_spread(others, max(2, _MAX_STEPS - len(last)))))
    previews = [[by_step.get(step) for step in steps] for by_step in of_runs]
    return SharedPrompt(prompt=prompt, steps=steps, previews=previews)


FILTERS = {
    "duration": duration,
    # Seconds since 1970 as ISO 8601 in UTC, which the page's script shows in local time.
    "moment": lambda seconds: datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds"),
    "number": lambda value: "" if value is None else f"{value:.4g}",
    "percent": lambda ratio: "" if ratio is None else f"{100 * ratio:+.1f} %",
    "sparkline": _sparkline,
    "base64": lambda content: base64.b64encode(content).decode(),
}
