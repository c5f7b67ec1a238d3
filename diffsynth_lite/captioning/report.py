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

from diffsynth_lite.data.records import WHOLE, Part
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import DISK_FULL, read_bytes, write_json, write_json_over
from diffsynth_lite.run_folder.lock import open_lock
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

    A process that writes the captions of a part of the items has files of its own, as nodes that share a
    folder cannot append to one file at the same time.

    Args:
        data_folder: the folder with the images and clips.
        part: of its items.
    """

    def __init__(self, data_folder: Path, part: Part = WHOLE) -> None:
        self.folder, self.part = data_folder / ".captions", part
        mark = "" if part.is_whole else f".{part.index}-of-{part.count}"
        self.rows_file = self.folder / f"report{mark}.jsonl"
        self.status_file = self.folder / f"status{mark}.json"
        self.page_file = self.folder / "captions.html"
        self.lock_file = self.folder / f".lock{mark}"

    def rows(self) -> dict[str, CaptionRow]:
        """The latest row of each item."""
        return {row.file: row for row in sorted(self.all_rows(), key=lambda row: row.written_at)}

    def all_rows(self) -> Iterator[CaptionRow]:
        """All rows, those of parts last; lines that cannot be read, as after a kill, are skipped."""
        for file in (self.folder / "report.jsonl", *self._files_of_parts()):
            yield from _rows_in(file)

    def take_parts(self) -> None:
        """Append the rows of the parts to those of all items, and remove the files of the parts.

        A part that is written now is left for later.
        """
        if not self.part.is_whole:
            return
        for file in self._files_of_parts():
            mark = file.name.removeprefix("report").removesuffix(".jsonl")
            with suppress(UserError), open_lock(self.folder / f".lock{mark}", place=str(file)).file:
                for row in _rows_in(file):
                    self.add(row)
                for name in (file.name, f"status{mark}.json", f".lock{mark}"):
                    (self.folder / name).unlink(missing_ok=True)

    def _files_of_parts(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("report.*-of-*.jsonl") if not path.is_symlink())

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


def _rows_in(file: Path) -> Iterator[CaptionRow]:
    lines: list[bytes] = []
    with suppress(OSError, ValueError):
        lines = read_bytes(file, most_bytes=_MOST_BYTES).splitlines()
    for line in lines:
        with suppress(ValueError):
            yield _ROW.validate_json(line)


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
