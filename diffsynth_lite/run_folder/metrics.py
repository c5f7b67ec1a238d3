"""This file writes the numbers of a run, to files of rows by step and to trackers, and its measured items."""

import importlib.util
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, write_text
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.reading import read_run_file

if TYPE_CHECKING:  # readers of a run need none of it, and it imports torch
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

NOISE_TENTHS = tuple(f"{tenth / 10:.1f}-{(tenth + 1) / 10:.1f}" for tenth in range(10))
"""Names of the ten equal parts of the noise levels, the least noise first; 1 itself is in the last."""

LOSS_BY_NOISE = "loss_by_noise/"
SAMPLES_BY_NOISE = "samples_by_noise/"
"""Prefixes of a tenth: mean loss and number of its samples since the last row with any."""

STEP_SECONDS = "step_seconds/"
"""Prefix of a part of a step: its mean seconds a step since the row before."""
STEP_PARTS = {
    "data": "waiting for data",
    "forward": "forward pass and loss",
    "backward": "backward pass",
    "update": "clipping and optimizer",
    "between": "between steps",
}

RATE_OF_GROUP = "learning_rate/"
"""Prefix of the name of a group of layers."""

Value = float | Sequence["Value"] | Mapping[str, "Value"]
"""A value of a row: a number, or several in order or by name."""


class MetricsFile:
    """A file of rows of ``step``, ``time`` (seconds since 1970) and the values logged, as ``metrics.jsonl``.

    A process killed while it wrote leaves a torn last line: readers drop it, and ``cut_back_to``, which
    is called before the first ``append`` of a resumed run, removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, values: Mapping[str, Value]) -> None:
        """Add the row of one step; it outlives this process as soon as the call returns.

        json has neither NaN nor infinity: such a value is written as ``null``, so that the file shows a loss
        that was logged and was not finite.
        """
        row = {"step": step, "time": round(time.time(), 3)}
        reserved = row.keys() & values.keys()
        assert not reserved, f"metrics named {sorted(reserved)} would hide ours"
        row |= _as_json(values)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows in the order they were written, without a torn last line; empty without a file."""
        if not self.path.exists():
            return []
        # What follows the last line break is empty, or torn.
        lines = read_run_file(self.path).split(b"\n")[:-1]
        return [self._parse(line, number) for number, line in enumerate(lines, start=1)]

    def warn_of_lost_rows(self, step: int) -> None:
        """Warn if the row of a logged step is missing, because a power cut or a user truncated the file."""
        logged = [row["step"] for row in self.rows() if "grad_norm" in row]
        if step not in logged:
            logger.warning(
                "%s ends at step %d, and step %d was logged: some rows were lost; training is not affected",
                self.path,
                max(logged, default=0),
                step,
            )

    def cut_back_to(self, step: int) -> None:
        """Remove the rows of later steps, which a run resumed at ``step`` takes again."""
        if self.path.exists():
            kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
            write_text(self.path, "".join(kept))

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(
                f"{self.path} line {number} is not a row of metrics: repair it or move the file aside"
            )
        return row


def _as_json(value: Value) -> Any:
    """The value with null for each number that json cannot hold."""
    if isinstance(value, Mapping):
        return {name: _as_json(held) for name, held in value.items()}
    if isinstance(value, Sequence):
        return [_as_json(held) for held in value]
    return value if math.isfinite(value) else None


def require_trackers(names: Sequence[str]) -> None:
    """Check that the packages of the trackers are installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"logging.trackers: {', '.join(missing)} is not installed: pip install {' '.join(missing)}"
        )


def start_trackers(
    accelerator: "Accelerator",
    *,
    names: Sequence[str],
    project: str,
    settings: Mapping[str, Any],
    folder: Path,
    run_name: str | None,
    run_id: str,
    wandb_mode: str,
) -> None:
    """Start the accelerator's trackers; a resumed run continues its wandb run.

    They get numbers, and the settings with secrets masked. The rest that wandb would send is off: the command
    line, the terminal's output, and changes in the git repository.

    Args:
        folder: where offline files go.
        run_name: None lets the tracker choose.
    """
    if not names:
        return
    from wandb import Settings as WandbSettings  # wandb takes a second to import
    from wandb.errors import Error as WandbError

    folder.mkdir(parents=True, exist_ok=True)
    # Trackers show neither lists nor None, which they get as text.
    shown = {
        name: value if isinstance(value, str | int | float | bool) else str(value)
        for name, value in flat_settings(settings).items()
    }
    wandb = {
        "dir": str(folder),
        "mode": wandb_mode,
        "name": redacted(run_name),
        "id": run_id,
        "resume": "allow",
        # The command line is part of wandb's metadata.
        "settings": WandbSettings(console="off", x_disable_meta=True, disable_git=True, disable_code=True),
    }
    try:
        accelerator.init_trackers(redacted(project), config=redacted(shown), init_kwargs={"wandb": wandb})
    except WandbError as error:
        raise UserError(
            f"logging.trackers: wandb: {error}; log in with `wandb login`, or set logging.wandb_mode=offline"
        ) from error


def metrics_by_noise(totals: Sequence[float]) -> dict[str, float]:
    """Metrics of the tenths of the noise levels that have samples.

    Args:
        totals: of each tenth the sum of its samples' losses, then of each their number; or none.
    """
    parts = zip(NOISE_TENTHS, totals[: len(NOISE_TENTHS)], totals[len(NOISE_TENTHS) :], strict=False)
    seen = [(tenth, loss / samples, samples) for tenth, loss, samples in parts if samples]
    return {f"{LOSS_BY_NOISE}{tenth}": loss for tenth, loss, _ in seen} | {
        f"{SAMPLES_BY_NOISE}{tenth}": samples for tenth, _, samples in seen
    }


class MetricsLog:
    """Writes numbers to ``metrics.jsonl`` and to the trackers."""

    def __init__(self, file: MetricsFile, accelerator: "Accelerator") -> None:
        self._file = file
        self._accelerator = accelerator

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row; call it on the main process or on all: only the main one writes."""
        if not self._accelerator.is_main_process or not values:
            return
        self._file.append(step, values)
        self._accelerator.log(dict(values), step=step)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_nested = isinstance(value, Mapping)
        flat |= flat_settings(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat


@dataclass(frozen=True, kw_only=True)
class MeasuredItem:
    """A training item, and how its losses in ``item_losses.jsonl`` are measured.

    Attributes:
        name: unique in the run, without the folder of the data.
        size: name of its bucket, as in 512x768 or 512x768x49.
        measured_by: equal if losses are comparable: a hash of the item's tensors, its noise, and whether the
            averaged weights are measured.
        thumbnail: data URL of a small JPEG, with some frames of a clip side by side; None if the file gave
            none.
    """

    name: str
    caption: str
    size: str
    noise_levels: Sequence[float]
    measured_by: str
    thumbnail: str | None


def write_items(path: Path, items: Sequence[MeasuredItem]) -> None:
    """Write the file, or replace it, with secrets in names and captions masked."""
    rows = [{**asdict(item), "noise_levels": list(item.noise_levels)} for item in items]
    for row in rows:
        row |= redacted({key: row[key] for key in ("name", "caption")})
    write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def read_items(path: Path) -> list[MeasuredItem]:
    """The items in the order of the losses; empty without a file."""
    try:
        lines = read_run_file(path).splitlines()
    except FileNotFoundError:
        return []
    return [_parse_item(path, line, number) for number, line in enumerate(lines, start=1)]


def _parse_item(path: Path, line: bytes, number: int) -> MeasuredItem:
    try:
        row = parse_json(line)
        return MeasuredItem(**{field.name: row[field.name] for field in fields(MeasuredItem)})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} line {number} is not a row of an item: repair it or remove the file"
        ) from error
