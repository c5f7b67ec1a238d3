"""This file reads the files of a run, also incomplete ones: while it writes, or after it was killed."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from diffsynth_lite.config import load_yaml
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import parse_json, read_bytes, require_file
from diffsynth_lite.redaction import redacted

_MIB = 1 << 20
_MOST_BYTES = {
    "metrics.jsonl": 1024 * _MIB,  # 100,000 rows of 1 kB
    "layers.jsonl": 2048 * _MIB,  # 4,000 rows of 840 layers with 59 bytes
    "item_losses.jsonl": 1024 * _MIB,  # 4,000 rows of 200 items with 90 bytes
    ".jsonl": 128 * _MIB,  # 200,000 samples with 30 bytes and names, of which no more are ever kept
    ".lock": 4096,
    ".png": 512 * _MIB,  # an image of 4096 x 4096 that cannot be compressed
    ".mp4": 512 * _MIB,
    ".json": 16 * _MIB,  # 1,000 starts of 0.4 kB, and as many layers with 250 bytes of an optimizer's state
    ".yaml": _MIB,  # as a config, of which this is a copy
    ".md": _MIB,
    "COMPLETE": _MIB,
}
"""Largest size of a file of a run folder, by its name or suffix: at least ten times that after a million
steps with a log every 10 and an evaluation every 250. The sizes of rows were measured."""
_MOST_ROWS = {
    "metrics.jsonl": 1_000_000,
    "layers.jsonl": 40_000,
    "item_losses.jsonl": 40_000,
    ".jsonl": 2_000_000,
}
"""Most rows, ten times the numbers above: rows of a few bytes take far more memory than their file."""

_Read = TypeVar("_Read")


def read_run_file(path: Path) -> bytes:
    """Content of a file in a run folder, which may be somebody else's.

    Raises:
        UserError: it is not a regular file, or larger than any that a run writes.
        OSError: it is not there, or cannot be read.
    """
    return read_bytes(path, most_bytes=_most(_MOST_BYTES, path))


def require_run_file(path: Path) -> None:
    """Check as :func:`read_run_file` does a file that other code reads, such as a config."""
    require_file(path, most_bytes=_most(_MOST_BYTES, path))


def _most(limits: Mapping[str, int], path: Path) -> int:
    return limits.get(path.name) or limits[path.suffix]


class TolerantReader:
    """Reads files of a run folder for people to look at, with secrets masked.

    A file that is not there is empty. Content that cannot be read is left out and listed in ``problems``,
    where a resumed run would get an error.

    Attributes:
        problems: a line for each file of which something is left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problems: list[str] = []

    def mapping(self, name: str) -> dict[str, Any]:
        """The mapping in a json or yaml file; empty where it holds anything else."""
        return self._document(name, dict)

    def sequence(self, name: str) -> list[Any]:
        """The list in a json or yaml file; empty where it holds anything else."""
        return self._document(name, list)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file of json lines; the last one may be torn, which is not a problem."""
        content, most = self._bytes(name), _most(_MOST_ROWS, Path(name))
        if (num_rows := content.count(b"\n")) > most:
            self.problems.append(
                f"{name} has {num_rows:,} rows, where {most:,} are the most, and is left out"
            )
            return []
        *lines, _ = content.split(b"\n")
        del content  # it takes as much memory as they do
        rows = [_masked(row) for line in lines if (row := _row(line)) is not None]
        if unread := len(lines) - len(rows):
            self.problems.append(f"{name}: {unread} of {len(lines)} lines are not rows and are left out")
        return rows

    def _document(self, name: str, kind: type[_Read]) -> _Read:
        content = self._bytes(name)
        if not content:
            return kind()
        try:
            document = parse_json(content) if name.endswith(".json") else load_yaml(content.decode())
        except ValueError:
            document = None
        if type(document) is not kind:
            self.problems.append(f"{name} cannot be read and is left out")
            return kind()
        masked: _Read = redacted(document)
        return masked

    def _bytes(self, name: str) -> bytes:
        try:
            return read_run_file(self._folder / name)
        except FileNotFoundError:
            return b""
        except UserError as error:
            self.problems.append(f"{str(error).replace(str(self._folder / name), name)}, and is left out")
            return b""
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror}")
            return b""


def _masked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without secrets. Numbers and names of columns hold none: to mask these, too, took five times as
    long as everything else in reading 20,000 rows."""
    return {
        sys.intern(name): value if isinstance(value, int | float | None) else redacted(value)
        for name, value in row.items()
    }


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
