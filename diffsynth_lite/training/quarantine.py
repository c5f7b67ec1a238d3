"""This file keeps the list of items that a run cannot use, and why."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diffsynth_lite.config import Config
from diffsynth_lite.data import BadItemsError, Record
from diffsynth_lite.errors import UserError
from diffsynth_lite.redaction import redacted
from diffsynth_lite.training.files import write_text_atomic
from diffsynth_lite.training.run_folder.folder import RunFolder


class Quarantine:
    """``quarantine.jsonl`` of a run: one row an item that cannot be used; written anew by each start."""

    def __init__(self, config: Config) -> None:
        self._path = RunFolder(Path(config.output.dir).expanduser()).quarantine_file
        self._rows: dict[tuple[str, str], None] = {}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Name of each item, and why it cannot be used."""
        return list(self._rows)

    def add(self, record: Record, reason: str) -> None:
        """Note one item and why it cannot be used."""
        self.add_rows([(record.name, reason)])

    def add_rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Note `rows` of another process."""
        self._rows |= dict.fromkeys(rows)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Scope in which an error about bad items also says where all of them are listed.

        Raises:
            UserError: instead of the BadItemsError.
        """
        try:
            yield
        except BadItemsError as error:
            raise UserError(f"{error}. All of them are listed in {self._path}") from error

    def write(self) -> None:
        """Write the file; none when everything can be used."""
        if not self._rows:
            self._path.unlink(missing_ok=True)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rows = (json.dumps({"item": name, "reason": reason}) for name, reason in redacted(self.rows))
        write_text_atomic(self._path, "".join(f"{row}\n" for row in rows))
