"""This file writes the page of a run, or of several side by side: one HTML file that fetches nothing."""

import base64
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from diffsynth_lite.files import replacing
from diffsynth_lite.report.charts import Chart, charts_of
from diffsynth_lite.report.previews import embedded
from diffsynth_lite.report.run_report import RunReport, read_run
from diffsynth_lite.report.side_by_side import side_by_side
from diffsynth_lite.run_folder.folder import RunFolder

_SCRIPTS = ("live.js", "vendor/uPlot.iife.min.js", "report.js")
_TEMPLATES = ("page.html", "run.html", "several.html")
_HEAD_BYTES = 1000
"""Of a page; the mark of what wrote it is in them."""
_STYLES = ("vendor/uPlot.min.css", "style.css", "report.css")


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder, whole or not at all; returns its path.

    Raises:
        OSError: it could not be written; the old page is as it was.
    """
    path = RunFolder(folder).report_file
    write_page(path, [read_run(folder)])
    return path


def is_current_page(path: Path) -> bool:
    """Whether there is a page, and one that was written as pages are now."""
    try:
        with path.open("rb") as file:
            return _generator().encode() in file.read(_HEAD_BYTES)
    except OSError:
        return False


def write_page(path: Path, runs: Sequence[RunReport]) -> None:
    """Write the page of runs, whole or not at all.

    Raises:
        OSError: it could not be written; the old page is as it was.
    """
    with replacing(path) as temporary:
        temporary.write_text(render(runs), encoding="utf-8")


def render(runs: Sequence[RunReport], *, is_served: bool = False) -> str:
    """The page of one run, or of several side by side with their lines in the same charts.

    Nothing but the scripts of this package runs in it, whatever captions, prompts and names hold: these are
    escaped, and the page's policy allows no other script and no other place.

    Args:
        is_served: whether a server answers for it: then previews are files that it has, and the page asks it
            again and again what is new. Else they are part of the page, as far as it stays small, and that of
            a run that goes on is loaded again now and then.
    """
    scripts = [_resource(name) for name in _SCRIPTS]
    page = (
        _environment()
        .get_template("page.html")
        .render(
            runs=runs,
            media=[
                {} if is_served else embedded(run.folder, run.prompts, share=1 / len(runs)) for run in runs
            ],
            compared=side_by_side(runs) if len(runs) > 1 else None,
            renewal="ask" if is_served else "reload" if any(run.state.is_running for run in runs) else "none",
            run_page="" if is_served else "report.html",
            charts=[chart for chart in _charts(runs) if any(chart.is_shown(run.series) for run in runs)],
            data=_chart_data(runs),
            scripts=scripts,
            script_hashes=[_script_hash(script) for script in scripts],
            styles=[_resource(name) for name in _STYLES],
            generator=_generator(),
            written_at=time.time(),
        )
    )
    # Names of files and texts of json may hold surrogates, which UTF-8 has not.
    return page.encode(errors="replace").decode()


@cache
def _generator() -> str:
    """What stands in a page for the templates and scripts that made it."""
    made_of = "".join(map(_resource, (*_TEMPLATES, *_SCRIPTS, *_STYLES)))
    return f"diffsynth_lite {hashlib.sha256(made_of.encode()).hexdigest()[:16]}"


@cache
def _environment() -> Environment:
    """Keeps the templates as they were compiled, which takes three times as long as a page."""
    environment = Environment(
        loader=PackageLoader("diffsynth_lite.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
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


def _chart_data(runs: Sequence[RunReport]) -> dict[str, object]:
    """What the page's script draws."""
    return {
        "runs": [
            {"name": run.name, "series": {name: series.document() for name, series in run.series.items()}}
            for run in runs
        ],
        "charts": {chart.name: asdict(chart) for chart in _charts(runs)},
    }


def _charts(runs: Sequence[RunReport]) -> list[Chart]:
    return charts_of(dict.fromkeys(name for run in runs for name in run.series))


def _resource(name: str) -> str:
    return files("diffsynth_lite.report").joinpath(name).read_text(encoding="utf-8")


def _script_hash(script: str) -> str:
    """What the page's policy knows a script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _moment(seconds: float) -> str:
    """Seconds since 1970 as ISO 8601 in UTC, which the page's script shows in local time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * ratio:+.1f} %"


def _sparkline(values: Sequence[float]) -> str:
    """Points of a line in a box of 80 x 20, the largest value on top."""
    low, high = min(values), max(values)
    height = 16 / (high - low) if high > low else 0.0
    width = 78 / max(1, len(values) - 1)
    return " ".join(
        f"{1 + place * width:.1f},{18 - (value - low) * height:.1f}" for place, value in enumerate(values)
    )


def _block_number(block: str) -> str:
    """The last number in the name of a block."""
    return block.rpartition(".")[2]


_FILTERS = {
    "duration": duration,
    "moment": _moment,
    "number": _number,
    "percent": _percent,
    "sparkline": _sparkline,
    "block_number": _block_number,
}
