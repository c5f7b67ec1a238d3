"""This file reads all that the page of a run shows from the run's folder, whatever state that is in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffsynth_lite.report.charts import read_series
from diffsynth_lite.report.series import Series, as_number
from diffsynth_lite.report.state import RunState, read_state
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.reading import TolerantReader


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the page shows of one run; texts have their secrets masked.

    Attributes:
        name: of the folder.
        folder: where links lead.
        series: lines of charts, by metric.
        problems: what could not be read, a line each.
    """

    name: str
    folder: Path
    state: RunState
    series: Mapping[str, Series]
    problems: Sequence[str]


def read_run(path: Path) -> RunReport:
    """Read a run folder: of any version, finished, going on or killed, with files missing or half-written."""
    folder, reader = RunFolder(path), TolerantReader(path)
    settings = reader.mapping(folder.resolved_file.name)
    rows = reader.rows(folder.metrics_file.name)
    state = read_state(
        reader.mapping(folder.status_file.name),
        rows,
        reader.sequence(folder.lineage_file.name),
        is_abandoned=folder.is_abandoned(),
        total_steps=as_number(_section(settings, "train").get("steps")),
    )
    return RunReport(
        name=path.resolve().name,
        folder=path,
        state=state,
        series=read_series(rows),
        problems=reader.problems,
    )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name)
    return section if isinstance(section, dict) else {}
