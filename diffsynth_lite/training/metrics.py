"""The metrics file of a run: one json row for each logged step."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffsynth_lite.errors import UserError
from diffsynth_lite.training.files import write_text_atomic


class MetricsFile:
    """``metrics.jsonl``: rows of ``step``, ``time`` (seconds since 1970) and the values logged.

    A process killed while it wrote leaves a torn last line: readers drop it, and ``cut_back_to``, which
    comes before the first ``append`` of a resumed run, removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add the row of one step; it outlives this process as soon as the call returns.

        json has neither NaN nor infinity: such a value is written as ``null``, so that a loss that was not
        finite stands in the file as one that was logged and has no number.

        Args:
            step: optimizer steps taken.
            values: by metric name; ``step`` and ``time`` are ours.
        """
        row: dict[str, float | None] = {"step": step, "time": round(time.time(), 3)}
        reserved = row.keys() & values.keys()
        assert not reserved, f"metrics named {sorted(reserved)} would hide ours"
        row |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows in the order they were written, without a torn last line; none when there is no file.

        Raises:
            UserError: another line is not a row.
        """
        if not self.path.exists():
            return []
        # What follows the last line break is empty, or torn.
        lines = self.path.read_bytes().split(b"\n")[:-1]
        return [self._parse(line, number) for number, line in enumerate(lines, start=1)]

    def cut_back_to(self, step: int) -> None:
        """Remove the rows of later steps, which a run resumed at ``step`` is going to take again.

        Raises:
            UserError: a line is not a row.
        """
        if self.path.exists():
            kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
            write_text_atomic(self.path, "".join(kept))

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise UserError(
                f"{self.path} line {number} is not a row of metrics: repair it or move the file aside"
            )
        return row
