"""This file reads the little of a run that a list of many shows, in milliseconds and whatever its length."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json
from diffsynth_lite.media import evenly_spread
from diffsynth_lite.redaction import redacted
from diffsynth_lite.report.charts import Series, as_number
from diffsynth_lite.report.previews import last_preview
from diffsynth_lite.report.record import RunState, read_state
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.loras import SUFFIX, metadata_of
from diffsynth_lite.run_folder.reading import TolerantReader, read_run_file, require_run_file

_NUM_PARTS = 16
_PART_BYTES = 4 * 1024
"""Of a longer file of metrics only so many parts are read, evenly spread: some rows of each."""
_MAX_ROWS = 120
_MAX_POINTS = 40
_MOST_DIGITS = 16
_SHOWN = (
    "model.path",
    "model.family",
    "model.quantize",
    "lora.rank",
    "data.path",
    "data.dataset",
    "train.steps",
)
_SETTING = re.compile(r"  (\w+): (.+)")
"""A setting of a section in ``resolved.yaml`` with its value on one line; to parse it all takes 30 ms."""


@dataclass(frozen=True, kw_only=True)
class RunCard:
    """A run in a list of many; texts have their secrets masked.

    Attributes:
        loss: smoothed.
        course: the smoothed loss from the first step to the last, in few points.
        model: name of the model or of its folder; empty where the settings are not there yet.
        family: of the model; empty where the settings are not there yet.
        data: name of the data set.
        details: more of its settings, such as "rank 16".
        preview: path of the latest one in the folder; None before there is one.
        best_step: whose LoRA is in ``lora_best``; None where there is none.
    """

    folder: Path
    state: RunState
    loss: float | None
    course: Sequence[float]
    model: str
    family: str
    data: str
    details: Sequence[str]
    preview: str | None
    best_step: int | None


def read_card(path: Path) -> RunCard:
    """Read a run folder as :func:`read_run` does, but no file as a whole that grows with the run."""
    folder, reader = RunFolder(path), TolerantReader(path)
    settings = redacted(dict(_settings(folder.resolved_file)))
    rows = list(_rows(folder.metrics_file))
    course = Series.of(rows, "loss").smoothed().values
    steps, rank = as_number(settings.get("train.steps")), settings.get("lora.rank")
    kept_in = str(settings.get("model.quantize") or "").removeprefix("none")
    return RunCard(
        folder=path,
        state=read_state(
            reader.mapping(folder.status_file.name),
            rows,
            [],
            is_abandoned=folder.is_abandoned(),
            total_steps=steps,
        ),
        loss=course[-1] if course else None,
        course=[value for value in evenly_spread(course, _MAX_POINTS) if value is not None],
        model=_last_name(settings.get("model.path")),
        family=str(settings.get("model.family", "")),
        data=_last_name(settings.get("data.path") or settings.get("data.dataset")),
        details=[*([] if rank is None else [f"rank {rank}"]), *filter(None, [kept_in])],
        preview=last_preview(path),
        best_step=_best_step(folder),
    )


def _last_name(place: object) -> str:
    """The name that people know a model or a data set by: the last one of its path or hub id."""
    return PurePath(place).name if isinstance(place, str) else ""


def _settings(file: Path) -> Iterator[tuple[str, Any]]:
    """The settings with a value on one line, by dotted key: the file is written by us, a section a block."""
    try:
        lines = read_run_file(file).decode().splitlines()
    except (OSError, UserError, ValueError):
        return
    section = ""
    for line in lines:
        if not line.startswith(" "):
            section = line.rstrip(":")
        elif (match := _SETTING.fullmatch(line)) and (key := f"{section}.{match[1]}") in _SHOWN:
            with suppress(yaml.YAMLError):
                yield key, yaml.safe_load(match[2])


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    """Rows of metrics from the whole length of the file, the last one among them."""
    try:
        require_run_file(file)
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            is_short = size <= _NUM_PARTS * _PART_BYTES
            length, count = (size, 1) if is_short else (_PART_BYTES, _NUM_PARTS)
            parts = []
            for start in (place * (size - length) // max(1, count - 1) for place in range(count)):
                opened.seek(start)
                part = opened.read(length)
                # The text before the first line break is torn, but at the start of the file.
                parts.append(part if start == 0 else part.partition(b"\n")[2])
    except (OSError, UserError):
        return
    lines = [line for part in parts for line in part.split(b"\n")[:-1]]
    for line in evenly_spread(lines, _MAX_ROWS):
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row


def _best_step(folder: RunFolder) -> int | None:
    """The step of ``lora_best``, by the metadata of its file, which may be somebody else's."""
    files = [file for file in folder.best_lora_folder.glob(f"*{SUFFIX}") if file.is_file()]
    step = metadata_of(files[0]).get("diffsynth_lite.step", "") if files else ""
    return int(step) if step.isdecimal() and len(step) < _MOST_DIGITS else None
