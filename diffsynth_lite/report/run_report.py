"""This file reads the content of the page of a run from the run's folder, which may be incomplete."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.charts import (
    NO_TABLE,
    Series,
    Table,
    as_number,
    read_series,
    time_shares,
    update_series,
)
from diffsynth_lite.report.judgement import Judgement, judge, judge_items
from diffsynth_lite.report.layers import Layers, read_layers
from diffsynth_lite.report.losses import hard_items, item_courses, item_progress, noise_levels, noise_tenths
from diffsynth_lite.report.previews import PromptPreviews, find_previews
from diffsynth_lite.report.record import (
    RunState,
    changed_settings,
    memory_use,
    read_state,
    run_files,
    skipped_items,
    starts,
)
from diffsynth_lite.report.scores import RunScores, read_run_scores
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import MeasuredItem, read_items
from diffsynth_lite.run_folder.reading import TolerantReader

logger = logging.getLogger(__name__)

_JUDGED = ("validation_loss", "train_fixed_noise_loss")
"""The metrics by which a run is judged: the second one where there is too little of the first."""


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """The content of the page of one run; texts have their secrets masked.

    Attributes:
        node: name of its machine, where that is another one.
        base: put before the names of files in the folder to link them from the page.
        series: lines of charts, by metric.
        scores: None where its images were not scored.
        judgements: sentences on how well it learns; none before there are enough evaluations.
        has_audio: whether clips are trained on and generated with audio.
        problems: a line for each file that could not be read.
    """

    name: str
    folder: Path
    base: str
    state: RunState
    node: str = ""
    series: Mapping[str, Series] = field(default_factory=dict)
    time_shares: str = ""
    scores: RunScores | None = None
    judgements: Sequence[Judgement] = ()
    prompts: Sequence[PromptPreviews] = ()
    has_audio: bool = False
    items: Table = NO_TABLE
    hard_items: Table = NO_TABLE
    noise: Table = NO_TABLE
    noise_levels: Table = NO_TABLE
    layers: Layers | None = None
    memory: Table = NO_TABLE
    changed_settings: Table = NO_TABLE
    settings: str = ""
    starts: Table = NO_TABLE
    skipped: Table = NO_TABLE
    files: Table = NO_TABLE
    problems: Sequence[str]


def read_run(path: Path, *, base: str = "") -> RunReport:
    """Read a run folder: of any version, finished, running or killed, with files missing or half-written."""
    folder, reader = RunFolder(path), TolerantReader(path)
    settings = reader.mapping(folder.resolved_file.name)
    lineage = reader.sequence(folder.lineage_file.name)
    rows = reader.rows(folder.metrics_file.name)
    layer_rows = reader.rows(folder.layers_file.name)
    items, loss_rows = _items(folder, reader), reader.rows(folder.item_losses_file.name)
    state = read_state(
        reader.mapping(folder.status_file.name),
        rows,
        lineage,
        is_abandoned=folder.is_abandoned(),
        total_steps=as_number(_section(settings, "train").get("steps")),
    )
    validation = _section(settings, "validation")
    prompts, model_path = validation.get("prompts"), validation.get("model_path")
    scores = read_run_scores(folder, reader.problems)
    series = read_series(rows) | update_series(layer_rows) | (scores.series() if scores else {})
    # The size of a clip has a number of frames.
    dimensions = {str(item.size).count("x") for item in items}
    nouns = {frozenset({1}): "images", frozenset({2}): "clips"}
    judged = (
        scores.judgement() if scores else None,
        judge(
            *(series[name].points if name in series else [] for name in _JUDGED),
            has_finished=state.name == "finished",
        ),
        judge_items(item_courses(items, loss_rows), noun=nouns.get(frozenset(dimensions), "items")),
    )
    return RunReport(
        name=path.resolve().name,
        folder=path,
        base=base,
        state=state,
        node=folder.node,
        series=series,
        time_shares=time_shares(rows),
        scores=scores,
        judgements=[each for each in judged if each is not None],
        prompts=find_previews(
            path,
            [str(each) for each in prompts] if isinstance(prompts, list) else [],
            generated_on=Path(model_path).name if isinstance(model_path, str) else None,
        ),
        has_audio=_section(settings, "data").get("audio") is True,
        items=item_progress(items, loss_rows),
        hard_items=hard_items(reader.rows(folder.sample_losses_file.name), items),
        noise=noise_tenths(rows),
        noise_levels=noise_levels(items, loss_rows),
        layers=read_layers(layer_rows),
        memory=memory_use(rows),
        changed_settings=changed_settings(settings),
        settings=yaml.safe_dump(settings, sort_keys=False, allow_unicode=True) if settings else "",
        starts=starts(lineage),
        skipped=skipped_items(reader.rows(folder.quarantine_file.name)),
        files=run_files(path),
        problems=reader.problems,
    )


def read_any_run(path: Path, *, base: str = "") -> RunReport:
    """As :func:`read_run`; a run that cannot be read is reported as unreadable, with the reason.

    So a page of several runs still shows the others.
    """
    try:
        return read_run(path, base=base)
    except Exception as error:  # a folder of somebody else may hold anything
        reason = redacted(f"{type(error).__name__}: {' '.join(str(error).split())}")
        logger.warning(
            "%s cannot be read: %s", path, reason, exc_info=not isinstance(error, OSError | UserError)
        )
    state = replace(read_state({}, [], [], is_abandoned=False, total_steps=None), name="unreadable")
    problems = [f"cannot be read: {reason}"]
    return RunReport(name=path.resolve().name, folder=path, base=base, state=state, problems=problems)


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
