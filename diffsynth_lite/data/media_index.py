"""This file knows size and content of media files, and reads a file for that only when it has changed.

An index that is lost, damaged or locked costs time, because the files are read again, and is never an error.
Where many machines fill a cache by parts, none of them writes to the index: it takes over their rows later.
"""

import dataclasses
import hashlib
import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from diffsynth_lite.data.audio import DECODER_ID as AUDIO_DECODER_ID
from diffsynth_lite.data.audio import AudioFacts, check_audio
from diffsynth_lite.data.images import ImageFacts, check_image
from diffsynth_lite.data.records import Part, is_video
from diffsynth_lite.data.video import AVI_ID, VideoFacts, check_video, is_avi
from diffsynth_lite.data.video import DECODER_ID as VIDEO_DECODER_ID
from diffsynth_lite.errors import UserError, is_of_the_machine
from diffsynth_lite.files import file_fingerprint, replacing, write_synced

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_TABLE = """CREATE TABLE IF NOT EXISTS memory (
    name TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, value TEXT, checksum BLOB
) WITHOUT ROWID"""
_BROKEN = (sqlite3.Error, UnicodeDecodeError, OSError)
"""Errors of a damaged, locked or unwritable file; UnicodeDecodeError where its schema is not text."""

_LOCK_TIMEOUT_S = 30.0
_FLUSH_ROWS = 1000
_FLUSH_SECONDS = 5.0
_PART_SUFFIX = ".memory"
_PART_FLUSH_ROWS = 50_000
_PART_FLUSH_SECONDS = 60.0
"""Each flush of a part makes a file."""

MediaFacts = ImageFacts | VideoFacts

_FACTS_ID = f"facts 2 {VIDEO_DECODER_ID}"
_AUDIO_ID = f"audio 1 {AUDIO_DECODER_ID}"
_CONTENT_ID = "sha256"


@dataclass(frozen=True, slots=True)
class FileState:
    """Size and time of a file, which change with its content."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path | str) -> "FileState":
        """The state of a file."""
        stat = os.stat(path)  # noqa: PTH116 - one of a million, and Path.stat costs twice as much
        return cls(stat.st_size, stat.st_mtime_ns)


class FileMemory:
    """A text for each name, valid for one state of the file that it describes; kept in one SQLite file.

    Several processes may use one file. It has no write-ahead log, which needs memory that the processes
    share and so fails on network file systems. Use it as a context manager, or `flush` it.
    """

    _flush_rows = _FLUSH_ROWS
    _flush_seconds = _FLUSH_SECONDS

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: dict[str, tuple[FileState, str]] = {}
        self._flushed_at = time.monotonic()
        self._is_kept = True  # rows outlive this process
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._connect()
        except _BROKEN as error:
            self._connection = self._replace_file(error)

    def __enter__(self) -> "FileMemory":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def recall(self, name: str, state: FileState) -> str | None:
        """The text under ``name`` for this state of its file, or None."""
        if name in self._pending:
            pending_state, value = self._pending[name]
            return value if pending_state == state else None
        query = "SELECT size, mtime_ns, value, checksum FROM memory WHERE name = ?"
        row = self._attempt(lambda connection: connection.execute(query, (name,)).fetchone())
        if row is None or (row[0], row[1]) != (state.size, state.mtime_ns):
            return None
        return row[2] if row[3] == _checksum(name, state, row[2]) else None

    def remember(self, name: str, state: FileState, value: str) -> None:
        """Keep ``value`` for this state of the file; written within seconds, or by `flush`."""
        self._pending[name] = (state, value)
        is_due = time.monotonic() - self._flushed_at > self._flush_seconds
        if is_due or len(self._pending) >= self._flush_rows:
            self.flush()

    def flush(self) -> None:
        """Write all rows that are not written yet."""
        if self._pending:
            self._write(self._pending)
        self._pending.clear()
        self._flushed_at = time.monotonic()

    def adopt(self, path: Path) -> None:
        """Take over the rows that a `PartMemory` left in a file, and delete the file.

        A file that vanishes meanwhile was taken over by another process.
        """
        try:
            self._write(dict(_rows_in(path)))
            if self._is_kept:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s: cannot be taken into the index: %s", path, error)

    def close(self) -> None:
        """Write all rows that are not written yet, and close the file."""
        self.flush()
        self._connection.close()

    def _write(self, entries: Mapping[str, tuple[FileState, str]]) -> None:
        rows = [
            (name, state.size, state.mtime_ns, value, _checksum(name, state, value))
            for name, (state, value) in entries.items()
        ]

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("INSERT OR REPLACE INTO memory VALUES (?, ?, ?, ?, ?)", rows)

        self._attempt(write)

    def _attempt(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        for start_again in (self._replace_file, self._do_without):
            try:
                return work(self._connection)
            except _BROKEN as error:
                self._connection.close()
                self._connection = start_again(error)
        return work(self._connection)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT_S)
        try:
            connection.execute(_TABLE)
            # Columns of another version are found now and not in the middle of a run.
            connection.execute("SELECT name, size, mtime_ns, value, checksum FROM memory LIMIT 1")
        except BaseException:
            connection.close()
            raise
        return connection

    def _replace_file(self, error: Exception) -> sqlite3.Connection:
        """A new file in place of a damaged one."""
        logger.warning("%s: the index is started again: %s", self._path, error)
        try:
            # A file that is only locked stays: other processes use it.
            if not isinstance(error, sqlite3.OperationalError) or "no such column" in str(error):
                self._path.unlink(missing_ok=True)
            return self._connect()
        except _BROKEN as again:
            return self._do_without(again)

    def _do_without(self, error: Exception) -> sqlite3.Connection:
        """Memory of this process only."""
        logger.warning("%s: no index can be kept there, so files are read again: %s", self._path, error)
        self._is_kept = False
        return _empty_index()


class PartMemory(FileMemory):
    """The memory of one of several parts of a fill; the index itself is only read.

    Each flush makes a new file, which nobody changes, so that no lock is needed, whatever machines the parts
    are on. Rows of an earlier start of the part are in such files, or in the index if a start without parts
    has taken them over.

    Args:
        index: file of the `FileMemory` that will take over the rows.
        part: reads only its own files.
    """

    _flush_rows = _PART_FLUSH_ROWS
    _flush_seconds = _PART_FLUSH_SECONDS

    def __init__(self, index: Path, part: Part) -> None:
        super().__init__(index)
        self._stem = f"{part.index}-of-{part.count}"
        self._known = {
            name: entry
            for path in sorted(parts_folder(index).glob(f"{self._stem}.*{_PART_SUFFIX}"))
            for name, entry in _rows_in(path)
        }

    def recall(self, name: str, state: FileState) -> str | None:
        known = self._known.get(name)
        return known[1] if known and known[0] == state else super().recall(name, state)

    def _write(self, entries: Mapping[str, tuple[FileState, str]]) -> None:
        self._known.update(entries)
        folder = parts_folder(self._path)
        # In the order of time, so that of two rows of one name the newer is known.
        path = folder / f"{self._stem}.{time.time_ns()}-{uuid.uuid4().hex[:8]}{_PART_SUFFIX}"
        lines = (
            json.dumps([name, state.size, state.mtime_ns, value, _checksum(name, state, value).hex()])
            for name, (state, value) in entries.items()
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                write_synced(temporary, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            logger.warning("%s: cannot be written, so that files are read again: %s", path, error)

    def _connect(self) -> sqlite3.Connection:
        if not self._path.exists():
            return _empty_index()
        return sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=_LOCK_TIMEOUT_S)

    def _replace_file(self, error: Exception) -> sqlite3.Connection:
        return self._do_without(error)


def parts_folder(index: Path) -> Path:
    """Folder of the rows that the parts of a fill leave for the index, and of the items they could not
    use."""
    return index.with_name("parts")


def adopt_parts(index: Path) -> None:
    """Take the rows of the parts of a fill into the index; one process of those that share it does."""
    if files := sorted(parts_folder(index).glob(f"*{_PART_SUFFIX}")):
        logger.info("taking the file facts of the parts of a fill into %s", index)
        with FileMemory(index) as memory:
            for path in files:
                memory.adopt(path)


class MediaIndex:
    """Facts and fingerprints of files, remembered as long as size and time of change of a file stay."""

    def __init__(self, memory: FileMemory) -> None:
        self._memory = memory

    def facts(self, path: Path) -> MediaFacts:
        """Facts from the header of an image or the packets of a clip; nothing is decoded.

        Raises:
            OSError: the machine failed to read it.
            MemoryError: there was too little to read it.
        """

        def read() -> str:
            facts = check_video(path) if is_video(path.name) else check_image(path)
            return json.dumps(dataclasses.asdict(facts))

        facts_id = f"{_FACTS_ID} {AVI_ID}" if is_avi(path) else _FACTS_ID
        values = json.loads(self._recall(facts_id, path, read))
        return VideoFacts(**values) if is_video(path.name) else ImageFacts(**values)

    def audio(self, path: Path) -> AudioFacts | None:
        """Facts from the header of a clip about its audio; None where it has none."""

        def read() -> str:
            facts = check_audio(path)
            return json.dumps(facts and dataclasses.asdict(facts))

        values = json.loads(self._recall(_AUDIO_ID, path, read))
        return values and AudioFacts(**values)

    def content(self, path: Path) -> str:
        """The sha256 of the bytes of a file, in hexadecimal."""
        return self._recall(_CONTENT_ID, path, lambda: file_fingerprint(path))

    def _recall(self, what: str, path: Path, read: Callable[[], str]) -> str:
        # A hash, because a path need not be text that SQLite takes.
        name = hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest()
        try:
            state = FileState.of(path)  # before the reading: a file that changes meanwhile is read again
            value = self._memory.recall(f"{what} {name}", state)
            if value is None:
                value = read()
                self._memory.remember(f"{what} {name}", state, value)
            return value
        except OSError as error:
            if is_of_the_machine(error):
                raise
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _empty_index() -> sqlite3.Connection:
    """An index in the memory of this process."""
    connection = sqlite3.connect(":memory:")
    connection.execute(_TABLE)
    return connection


def _rows_in(path: Path) -> Iterator[tuple[str, tuple[FileState, str]]]:
    """The rows that a `PartMemory` wrote to a file, without damaged lines."""
    for line in path.read_bytes().splitlines():
        try:
            name, size, mtime_ns, value, checksum = json.loads(line)
            state = FileState(size, mtime_ns)
            is_whole = bytes.fromhex(checksum) == _checksum(name, state, value)
        except (ValueError, TypeError, RecursionError):
            continue
        if is_whole:
            yield name, (state, value)


def _checksum(name: str, state: FileState, value: str) -> bytes:
    """SQLite does not notice a flipped byte in a row."""
    text = f"{name}\0{state.size}\0{state.mtime_ns}\0{value}"
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
