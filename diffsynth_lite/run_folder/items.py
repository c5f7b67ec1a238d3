"""This file holds the training items whose losses are measured one by one: ``items.jsonl`` of a run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, write_text
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.reading import read_run_file


@dataclass(frozen=True, kw_only=True)
class MeasuredItem:
    """A training item, and how its losses in ``item_losses.jsonl`` are measured.

    Attributes:
        name: unique in the run, without the place of the data.
        caption: that it is measured with.
        size: name of its bucket, as in 512x768 or 512x768x49.
        noise_levels: that it is measured at, in [0, 1].
        measured_by: equal where losses compare: it stands for the item's tensors, its noise, and whether the
            averaged weights are measured.
        thumbnail: data URL of a small JPEG, of a clip of some of its frames side by side; None where no
            picture could be made of its file.
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
    """The items in the order of the losses; none where there is no file.

    Raises:
        UserError: a line is not a row of an item, or the file is not one that a run writes.
    """
    try:
        lines = read_run_file(path).splitlines()
    except FileNotFoundError:
        return []
    return [_parse(path, line, number) for number, line in enumerate(lines, start=1)]


def _parse(path: Path, line: bytes, number: int) -> MeasuredItem:
    try:
        row = parse_json(line)
        return MeasuredItem(**{field.name: row[field.name] for field in fields(MeasuredItem)})
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} line {number} is not a row of an item: repair it or remove the file"
        ) from error
