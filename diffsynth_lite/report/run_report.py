"""This file reads all that the page of a run shows from the run's folder, whatever state that is in."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.charts import read_series
from diffsynth_lite.report.hard_items import HardItems, read_hard_items
from diffsynth_lite.report.layers import Layers, read_layers, update_series
from diffsynth_lite.report.memory import Comparison, MemoryFact, memory_facts, plan_beside_measurement
from diffsynth_lite.report.noise import NoiseLevel, NoiseTenth, noise_levels, noise_tenths
from diffsynth_lite.report.previews import PromptPreviews, find_previews
from diffsynth_lite.report.record import (
    RunFile,
    Setting,
    Skipped,
    Start,
    all_settings,
    changed_settings,
    run_files,
    skipped,
    starts,
)
from diffsynth_lite.report.series import Series, as_number
from diffsynth_lite.report.state import RunState, read_state
from diffsynth_lite.report.teaching import Teaching, read_teaching
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.items import MeasuredItem, read_items
from diffsynth_lite.run_folder.reading import TolerantReader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the page shows of one run; texts have their secrets masked.

    Attributes:
        name: of the folder.
        folder: the run folder.
        base: what leads from the page to the folder, in front of names of files there.
        series: lines of charts, by metric.
        has_sound: whether clips are learned, and drawn, with their sound.
        problems: what could not be read, a line each.
    """

    name: str
    folder: Path
    base: str
    state: RunState
    series: Mapping[str, Series]
    prompts: Sequence[PromptPreviews]
    has_sound: bool
    teaching: Teaching | None
    hard_items: HardItems | None
    noise: Sequence[NoiseTenth]
    noise_levels: Sequence[NoiseLevel]
    layers: Layers | None
    memory: Sequence[MemoryFact]
    comparison: Comparison | None
    changed_settings: Sequence[Setting]
    settings: str
    starts: Sequence[Start]
    skipped: Sequence[Skipped]
    num_skipped: int
    files: Sequence[RunFile]
    problems: Sequence[str]


def read_run(path: Path, *, base: str = "") -> RunReport:
    """Read a run folder: of any version, finished, going on or killed, with files missing or half-written.

    Args:
        base: see :class:`RunReport`; empty for a page in the folder itself.
    """
    folder, reader = RunFolder(path), TolerantReader(path)
    settings = reader.mapping(folder.resolved_file.name)
    lineage = reader.sequence(folder.lineage_file.name)
    rows = reader.rows(folder.metrics_file.name)
    layer_rows = reader.rows(folder.layers_file.name)
    items, loss_rows = _items(folder, reader), reader.rows(folder.item_losses_file.name)
    quarantine = reader.rows(folder.quarantine_file.name)
    state = read_state(
        reader.mapping(folder.status_file.name),
        rows,
        lineage,
        is_abandoned=folder.is_abandoned(),
        total_steps=as_number(_section(settings, "train").get("steps")),
    )
    validation = _section(settings, "validation")
    prompts, drawn_on = validation.get("prompts"), validation.get("model_path")
    return RunReport(
        name=path.resolve().name,
        folder=path,
        base=base,
        state=state,
        series=read_series(rows) | update_series(layer_rows),
        prompts=find_previews(
            path,
            [str(each) for each in prompts] if isinstance(prompts, list) else [],
            drawn_on=Path(drawn_on).name if isinstance(drawn_on, str) else None,
        ),
        has_sound=_section(settings, "data").get("audio") is True,
        teaching=read_teaching(items, loss_rows),
        hard_items=read_hard_items(reader.rows(folder.sample_losses_file.name)),
        noise=noise_tenths(rows),
        noise_levels=noise_levels(items, loss_rows),
        layers=read_layers(layer_rows),
        memory=memory_facts(rows),
        comparison=plan_beside_measurement(rows),
        changed_settings=changed_settings(settings),
        settings=all_settings(settings),
        starts=starts(lineage),
        skipped=skipped(quarantine),
        num_skipped=len(quarantine),
        files=run_files(path),
        problems=reader.problems,
    )


def read_any_run(path: Path, *, base: str = "") -> RunReport:
    """As :func:`read_run`; a run that cannot be read is reported as unreadable, with the reason.

    A page of several runs shows the others all the same.
    """
    try:
        return read_run(path, base=base)
    except Exception as error:  # what is in the folder of somebody else may be anything
        reason = redacted(f"{type(error).__name__}: {' '.join(str(error).split())}")
        logger.warning(
            "%s cannot be read: %s", path, reason, exc_info=not isinstance(error, OSError | UserError)
        )
        return _unreadable(path, base, f"cannot be read: {reason}")


def _unreadable(path: Path, base: str, reason: str) -> RunReport:
    state = read_state({}, [], [], is_abandoned=False, total_steps=None)
    return RunReport(
        name=path.resolve().name,
        folder=path,
        base=base,
        state=replace(state, name="unreadable"),
        series={},
        prompts=[],
        has_sound=False,
        teaching=None,
        hard_items=None,
        noise=[],
        noise_levels=[],
        layers=None,
        memory=[],
        comparison=None,
        changed_settings=[],
        settings="",
        starts=[],
        skipped=[],
        num_skipped=0,
        files=[],
        problems=[reason],
    )


def _items(folder: RunFolder, reader: TolerantReader) -> list[MeasuredItem]:
    """The measured items; all or none, as their losses are in their order."""
    try:
        items = read_items(folder.items_file)
        return [
            replace(item, name=redacted(str(item.name)), caption=redacted(str(item.caption)))
            for item in items
        ]
    except (OSError, UserError):
        reader.problems.append(f"{folder.items_file.name} cannot be read and is left out")
        return []


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = settings.get(name)
    return section if isinstance(section, dict) else {}
