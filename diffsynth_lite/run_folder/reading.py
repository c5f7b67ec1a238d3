"""This file reads what a run left, also half of it: while it writes, or after it was killed."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from diffsynth_lite.redaction import redacted

_Read = TypeVar("_Read")


class TolerantReader:
    """Reads files of a run folder for people to look at, with secrets masked.

    A file that is not there is empty. What cannot be read is left out and said in ``problems``, where whoever
    continues the run would get an error.

    Attributes:
        problems: a line for each file of which something is left out.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.problems: list[str] = []

    def mapping(self, name: str) -> dict[str, Any]:
        """What a json or yaml file says by name; empty where it says anything else."""
        return self._document(name, dict)

    def sequence(self, name: str) -> list[Any]:
        """The list that a json or yaml file is; empty where it is anything else."""
        return self._document(name, list)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a file of json lines; the last one may be torn, which is no problem."""
        *lines, _ = self._bytes(name).split(b"\n")
        rows = [_masked(row) for line in lines if (row := _row(line)) is not None]
        if unread := len(lines) - len(rows):
            self.problems.append(f"{name}: {unread} of {len(lines)} lines are no rows and are left out")
        return rows

    def _document(self, name: str, kind: type[_Read]) -> _Read:
        content = self._bytes(name)
        if not content:
            return kind()
        try:
            document = json.loads(content) if name.endswith(".json") else yaml.safe_load(content)
        except (ValueError, yaml.YAMLError):
            document = None
        if type(document) is not kind:
            self.problems.append(f"{name} cannot be read and is left out")
            return kind()
        masked: _Read = redacted(document)
        return masked

    def _bytes(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.problems.append(f"{name} cannot be read: {error.strerror}")
            return b""


def _masked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without secrets. Numbers hold none, nor do names of columns: to mask these, too, took five times
    as long as all else that reading 20,000 rows takes."""
    return {
        sys.intern(name): value if isinstance(value, int | float | None) else redacted(value)
        for name, value in row.items()
    }


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
