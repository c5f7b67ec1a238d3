"""This file keeps the list of items that a run left out, and why."""

import json
from pathlib import Path

from diffsynth_lite.data import Record
from diffsynth_lite.training.files import write_text_atomic


class Quarantine:
    """``quarantine.jsonl``: one row an item left out; written anew by each start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, str] = {}

    def add(self, record: Record, reason: str) -> None:
        """Note one item and why it is left out."""
        self._rows[record.name] = reason

    def write(self) -> None:
        """Write the file; none when nothing was left out."""
        if not self._rows:
            self._path.unlink(missing_ok=True)
            return
        rows = (json.dumps({"item": name, "reason": reason}) for name, reason in self._rows.items())
        write_text_atomic(self._path, "".join(f"{row}\n" for row in rows))
