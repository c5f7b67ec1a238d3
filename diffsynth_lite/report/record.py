"""This file reads the state and the record of a run: settings, starts, memory, skipped items and files."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml

from diffsynth_lite.config import section_types
from diffsynth_lite.core.reports import (
    CompileReport,
    GradientReport,
    NotOffloadedReason,
    NotOffloadedTensors,
    StreamReport,
    quantization_lines,
)
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.progress_log import Phase
from diffsynth_lite.report.charts import Column, Table, as_number

_Report = TypeVar("_Report", GradientReport, StreamReport, CompileReport)

_STATES = ("running", "finished", "interrupted", "stopped", "diverged", "failed", "killed", "unreadable")
_LATEST_TIME = 253_402_300_799
"""The end of the year 9999, in seconds since 1970, after which there are no dates."""
_FILES = {
    "lora": "the LoRA",
    "lora_ema": "the moving average of the LoRA",
    "lora_best": "the best LoRA: by the loss on held-out data, or by the scores",
    "previews": "previews by prompt and step; grid.png has all of them",
    "metrics.jsonl": "the numbers of the charts, a row a logged step",
    "items.jsonl": "the items whose losses are measured one by one",
    "item_losses.jsonl": "their losses by step",
    "scores.json": "the scores of generated images by step",
    "sample_losses.jsonl": "the losses of samples that were trained on, by item",
    "layers.jsonl": "the update of each layer by step",
    "checkpoints": "states that the run can be continued from",
    "config.yaml": "the settings as given",
    "resolved.yaml": "all settings, defaults included",
    "command.json": "how the run was started last",
    "contract.json": "the fingerprint of the run, which a resumed run must match",
    "lineage.json": "each start of the run",
    "status.json": "the state of the run, for programs",
    "quarantine.jsonl": "items that cannot be used, and why",
    "held_out.jsonl": "items that are held out of training",
    "trackers": "files of wandb and tensorboard",
}
_MAX_LISTED = 500
_MEANINGS = {
    "quantised": "frozen weights kept in fewer bits",
    "blocks": "checkpointed blocks are computed a second time instead of being kept",
    "offloaded": "kept in host memory until they are needed again",
    "shared": "stay on the device, as all blocks read them",
    "not offloaded": "stay on the device, and why",
    "attention": "its outputs are kept, so that it is not computed a second time",
    "not recomputed": "left out, as no gradient needs them",
    "host memory": "taken by offloaded tensors",
    "device memory": "taken by tensors",
    "streamed": "weights that live in host memory and visit the device when their block runs",
    "compiled": "blocks that torch compiled",
}


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run: how it ended, how far it got and how long it took.

    Attributes:
        name: the state in ``status.json``, ``killed`` where that is running and its process is gone,
            ``unreadable`` where nothing could be read, or ``not started``.
        phase: what a running run does, such as ``encoding``, while that is not training; else empty.
        done: what of the phase is done, in bytes of a download; None if unknown.
        of: all of it; None if unknown.
        message: the trainer's message on how it ended; empty while it runs.
        step: optimizer steps done, or tried where the run diverged; where it ended early otherwise and could
            write so, those of its last checkpoint.
        total_steps: None if unknown.
        seconds_taken: from start to last sign, without the time between starts; None if unknown.
        seen_at: last sign of the trainer, seconds since 1970.
    """

    name: str
    message: str
    step: int
    total_steps: int | None
    samples_per_s: float | None
    seconds_left: float | None
    seconds_taken: float | None
    seen_at: float | None
    phase: str = ""
    done: int | None = None
    of: int | None = None

    @property
    def title(self) -> str:
        """The state as shown on the page, such as ``Encoding 18 of 26``."""
        name = (self.phase or self.name).capitalize()
        if self.done is None or self.of is None:
            return name
        done, of = map(format_bytes if self.phase == "downloading" else "{:,}".format, (self.done, self.of))
        return f"{name} {done} of {of}"

    @property
    def is_running(self) -> bool:
        """Whether the run is running, as far as its folder shows."""
        return self.name == "running"

    @property
    def done_ratio(self) -> float | None:
        """Part of the steps that are done, in [0, 1]."""
        return min(1.0, self.step / self.total_steps) if self.total_steps else None


def read_state(
    status: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    lineage: Sequence[Any],
    *,
    is_abandoned: bool,
    total_steps: float | None,
) -> RunState:
    """The state of a run.

    Args:
        total_steps: ``train.steps``, for a status without it.
    """
    name = str(status.get("state"))
    if name not in _STATES:
        name = "not started"
    if name == "running" and is_abandoned:
        name = "killed"
    is_running = name == "running"
    times = [time for row in rows if (time := _as_time(row)) is not None]
    signs = [*times, *filter(None, [_as_time(status)])]
    steps = [as_number(status.get("step"))]
    if name in ("running", "killed", "diverged"):
        steps += [as_number(row.get("step")) for row in rows[-1:]]
    total = as_number(status.get("total_steps")) or total_steps
    phase = status.get("phase") if is_running else None
    phase = phase if phase in get_args(Phase) else ""
    done, of = (as_number(status.get(key)) if phase else None for key in ("done", "of"))
    return RunState(
        name=name,
        message="" if is_running else str(status.get("message", "")),
        step=int(max(filter(None, steps), default=0)),
        total_steps=int(total) if total else None,
        samples_per_s=as_number(status.get("samples_per_s")) if is_running else None,
        seconds_left=as_number(status.get("seconds_left")) if is_running else None,
        # Another status may be of a start that has not come to the lineage.
        seconds_taken=_seconds_taken(signs if name == "finished" else times, lineage),
        seen_at=max(signs, default=None),
        phase=str(phase),
        done=None if done is None else int(done),
        of=None if of is None else int(of),
    )


def _as_time(row: Mapping[str, Any]) -> float | None:
    time = as_number(row.get("time"))
    return time if time is not None and 0 <= time <= _LATEST_TIME else None


def _seconds_taken(times: Sequence[float], lineage: Sequence[Any]) -> float | None:
    """Time from each start to the last sign before the next start."""
    starts = [start for entry in lineage if (start := started_at(entry)) is not None]
    total = 0.0
    for start, end in pairwise([*starts, math.inf]):
        total += max((time - start for time in times if start <= time < end), default=0.0)
    return total or None


def started_at(entry: object) -> float | None:
    """Time of a start in the lineage, in seconds since 1970."""
    try:
        return datetime.fromisoformat(entry["at"]).timestamp()  # type: ignore[index]
    except (TypeError, KeyError, ValueError, OverflowError):
        return None


def changed_settings(settings: Mapping[str, Any]) -> Table:
    """The settings that differ from their defaults, in the order of the file.

    Args:
        settings: of ``resolved.yaml``.
    """
    defaults = {section: kind.defaults() for section, kind in section_types().items()}
    rows = [
        (f"{section}.{name}", as_yaml(value))
        for section, values in settings.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if name not in defaults.get(section, {}) or defaults[section][name] != value
    ]
    return Table(columns=(Column(kind="key"), Column()), rows=rows)


def starts(lineage: Sequence[Any]) -> Table:
    """When and where the run was started, and what changed then, the first start first."""
    return Table(
        columns=(
            Column(title="when", kind="moment"),
            Column(title="on", kind="folded"),
            Column(title="what changed", kind="lines"),
        ),
        rows=[_start(entry) for entry in lineage if isinstance(entry, dict)],
    )


def skipped_items(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The items that cannot be used, up to a limit.

    Args:
        rows: of ``quarantine.jsonl``.
    """
    summary = f"{len(rows)} item{'s' * (len(rows) > 1)}" if rows else ""
    if len(rows) > _MAX_LISTED:
        summary += f", of which {_MAX_LISTED} are listed; the others are in quarantine.jsonl"
    listed = [(str(row.get("item")), str(row.get("reason"))) for row in rows[:_MAX_LISTED]]
    return Table(columns=(Column(), Column()), rows=listed, summary=summary)


def run_files(folder: Path) -> Table:
    """The files that the run left, the LoRA first; a folder's name ends with a slash."""
    rows = [
        (name, meaning, format_bytes(_size(folder / name)))
        for place, meaning in _FILES.items()
        for name in _names(folder, place)
    ]
    return Table(columns=(Column(kind="link"), Column(), Column(kind="count")), rows=rows)


def _names(folder: Path, place: str) -> list[str]:
    """The weight files in a folder of a LoRA, as phones open no folder; otherwise the place itself."""
    path = folder / place
    weights = sorted(path.glob("*.safetensors")) if place.startswith("lora") else []
    if weights:
        return [f"{place}/{each.name}" for each in weights]
    if not path.exists():
        return []
    return [f"{place}/" if path.is_dir() else place]


def _start(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Time, note, machine, versions and changes of a start."""
    versions = {**_mapping(entry, "versions"), "python": entry.get("python")}
    changes = [
        f"{key}: {as_yaml(change.get('from'))} to {as_yaml(change.get('to'))}"
        for key, change in _mapping(entry, "changed").items()
        if isinstance(change, dict)
    ]
    chosen = _mapping(entry, "chosen")
    changes += [f"memory.auto chose {key}: {as_yaml(value)}" for key, value in chosen.items()]
    return (
        (started_at(entry), f"after step {entry.get('step')}"),
        (
            f"{entry.get('processes')} x {entry.get('device')}",
            ", ".join(f"{name} {version}" for name, version in versions.items()),
        ),
        changes or ["nothing"],
    )


def _mapping(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    held = entry.get(name)
    return held if isinstance(held, dict) else {}


def as_yaml(value: Any) -> str:
    """A value on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("...\n").strip()


def _size(path: Path) -> int:
    """Bytes of a file, or of all in a folder; links are not followed, and vanished files count nothing."""
    total, found = 0, [path]
    while found:  # Not by recursion: somebody may have nested folders deeper than the stack.
        place = found.pop()
        with suppress(OSError):
            if place.is_dir() and not place.is_symlink():
                found += place.iterdir()
            else:
                total += place.lstat().st_size
    return total


def memory_use(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Quantised, recomputed, offloaded, streamed and compiled parts, from the report of the latest start.

    The summary compares the plan of a step with its measurement, where the run had a plan.
    """
    reports = [row for row in rows if "blocks_run" in row or "graphs_compiled" in row]
    starts = [place for place, row in enumerate(reports) if "blocks_run" in row]
    lines = []
    if starts:
        numbers: dict[str, float] = {}
        for row in reports[starts[-1] :]:
            numbers |= {name: value for name, each in row.items() if (value := as_number(each)) is not None}
        lines = [*_quantised(numbers), *_gradient(numbers), *_report(StreamReport, numbers).lines()]
        lines += _report(CompileReport, numbers).lines()
    facts = [line.split("  ", maxsplit=1) for line in lines]
    return Table(
        columns=(Column(kind="name"), Column(kind="noted")),
        rows=[(name, (value.strip(), _MEANINGS.get(name, ""))) for name, value in facts],
        summary=_planned_and_measured(rows),
    )


def _planned_and_measured(rows: Sequence[Mapping[str, Any]]) -> str:
    """The latest comparison that the run made; empty where it had no plan."""
    for row in reversed(rows):
        planned = as_number(row.get("device_bytes_predicted"))
        measured = as_number(row.get("device_bytes_measured"))
        if planned and measured:
            return (
                f"A step on the device: {format_bytes(measured)} measured, {format_bytes(planned)} planned "
                f"({100 * (measured / planned - 1):+.1f} %)."
            )
    return ""


def _quantised(numbers: Mapping[str, float]) -> list[str]:
    return quantization_lines(
        num_layers=int(numbers.get("layers_quantised", 0)),
        num_bytes=int(numbers.get("bytes_quantised", 0)),
        plain_bytes=int(numbers.get("bytes_before_quantisation", 0)),
    )


def _gradient(numbers: Mapping[str, float]) -> list[str]:
    stayed = {
        reason: NotOffloadedTensors(num_tensors=int(count), num_bytes=int(numbers.get(f"bytes_{name}", 0)))
        for reason in NotOffloadedReason
        if (count := numbers.get(f"tensors_{(name := f'not_offloaded_{reason.name.lower()}')}", 0))
    }
    return _report(GradientReport, numbers, not_offloaded=stayed).lines()


def _report(kind: type[_Report], numbers: Mapping[str, float], **others: Any) -> _Report:
    """A report from its logged numbers."""
    logged = {field.name: int(numbers[field.name]) for field in fields(kind) if field.name in numbers}
    return kind(**{**logged, **others})
