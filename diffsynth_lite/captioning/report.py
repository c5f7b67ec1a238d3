"""This file keeps the folder ``.captions`` of a data set: what a model wrote, and how far the command is.

Hidden folders are not data, so a run reads nothing of it.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from diffsynth_lite.files import DISK_FULL, read_bytes, write_json, write_json_over
from diffsynth_lite.run_folder.process import Process

CaptioningState = Literal["running", "finished", "stopped", "failed"]

_MOST_BYTES = 1 << 30
_MOST_STATUS_BYTES = 32 << 20


def caption_hash(caption: str) -> str:
    """Identifies the text of a caption, without white space around it."""
    return hashlib.sha256(caption.strip().encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionRow:
    """One caption that a model wrote: a line of ``report.jsonl``.

    Attributes:
        file: name of the item, with forward slashes.
        hash: of its caption, see :func:`caption_hash`.
        model: its name, or that of the server and its model.
        instruction: as it was given to the model.
        seconds: that the answer took; in a batch, its share.
        num_tokens: of the answer; None where a server does not report them.
        removed: names of the rules that cleaned the answer.
        cut: text that was cut from its end because the text encoder would not have read it.
        written_at: seconds since 1970.
    """

    file: str
    hash: str
    model: str
    instruction: str
    seconds: float
    num_tokens: int | None = None
    removed: tuple[str, ...] = ()
    cut: str = ""
    written_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CaptioningStatus:
    """How far the latest command is that writes captions in a folder: ``status.json``.

    Attributes:
        process: of the command, as :class:`Process` writes it.
        arguments: words of the command after ``caption``, to give it again.
        started_at: seconds since 1970; of a command that goes on after an interruption, its first start.
        phase: "downloading" and "loading", then "captioning".
        done: items that were answered, of ``total``, as far as this start has to do with them.
        seconds_per_item: so far; 0 before the first.
        failed: items without a caption, by the reason.
        preview: captions of a dry run, by item; none of them is in a file.
        message: how far its phase is, and at last how it ended.
    """

    state: CaptioningState
    process: str
    arguments: tuple[str, ...] = ()
    started_at: float = 0.0
    phase: str = "loading"
    done: int = 0
    total: int = 0
    seconds_per_item: float = 0.0
    model: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)
    preview: Mapping[str, str] = field(default_factory=dict)
    message: str = ""

    @property
    def is_running(self) -> bool:
        """Whether its process lives, as far as this machine knows."""
        process = Process.from_text(self.process)
        return self.state == "running" and process is not None and process.is_alive()


_ROW, _STATUS = TypeAdapter(CaptionRow), TypeAdapter(CaptioningStatus)


class CaptionReport:
    """The folder ``.captions`` of a data set; it is made when something is written.

    Args:
        data_folder: the folder with the images and clips.
    """

    def __init__(self, data_folder: Path) -> None:
        self.folder = data_folder / ".captions"
        self.rows_file = self.folder / "report.jsonl"
        self.status_file = self.folder / "status.json"
        self.page_file = self.folder / "captions.html"
        self.lock_file = self.folder / ".lock"

    def rows(self) -> dict[str, CaptionRow]:
        """The latest row of each item."""
        return {row.file: row for row in self.all_rows()}

    def all_rows(self) -> Iterator[CaptionRow]:
        """All rows, the oldest first; lines that cannot be read, as after a kill, are skipped."""
        lines: list[bytes] = []
        with suppress(OSError, ValueError):
            lines = read_bytes(self.rows_file, most_bytes=_MOST_BYTES).splitlines()
        for line in lines:
            with suppress(ValueError):
                yield _ROW.validate_json(line)

    def add(self, row: CaptionRow) -> None:
        """Append a row; it is on the disk when the call returns."""
        self.folder.mkdir(exist_ok=True)
        line = json.dumps(asdict(row), ensure_ascii=False).encode(errors="backslashreplace")
        with self.rows_file.open("ab+") as file:
            # A kill may have left a part of a line, which must not swallow this one.
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                line = b"\n" + line
            file.write(line + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def status(self) -> CaptioningStatus | None:
        """How far the latest command is; None where none was started, or its file is damaged."""
        try:
            return _STATUS.validate_json(read_bytes(self.status_file, most_bytes=_MOST_STATUS_BYTES))
        except (OSError, ValueError):
            return None

    def flag(self, name: str) -> str:
        """The value that a flag such as ``--goal`` had in the latest command; empty where it had none."""
        status = self.status()
        return dict(options_of(status.arguments)).get(name, "") if status else ""

    def write_status(self, status: CaptioningStatus) -> None:
        """Replace ``status.json``; on a full disk the old file is overwritten in place.

        Raises:
            OSError: the disk is full, and there was none, or the disk fails.
        """
        self.folder.mkdir(exist_ok=True)
        try:
            write_json(self.status_file, asdict(status))
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            write_json_over(self.status_file, asdict(status))


def is_by_model(row: CaptionRow | None, caption: str) -> bool:
    """Whether a caption is the one that a model wrote, and nobody has changed since."""
    return row is not None and row.hash == caption_hash(caption)


def options_of(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The options of a command with their values: each has one, but --dry-run may have none."""
    words, found = list(arguments), []
    while words:
        name, has_value, value = words.pop(0).partition("=")
        if not name.startswith("--"):
            continue  # the folder
        if not has_value and words and (name != "--dry-run" or words[0].isdecimal()):
            value = words.pop(0)
        found.append((name, value))
    return found
