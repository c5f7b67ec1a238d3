"""This file knows size and content of media files, and reads a file for that only when it has changed.

What is remembered is a convenience: an index that is lost, damaged or locked costs time, because the files
are read again, and is never an error.
"""

import dataclasses
import hashlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from diffsynth_lite.data.images import ImageFacts, check_image
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.video import DECODER_ID as VIDEO_DECODER_ID
from diffsynth_lite.data.video import VideoFacts, check_video
from diffsynth_lite.errors import UserError, is_of_the_machine

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_TABLE = """CREATE TABLE IF NOT EXISTS memory (
    name TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, value TEXT, checksum BLOB
) WITHOUT ROWID"""
_BROKEN = (sqlite3.Error, UnicodeDecodeError, OSError)
"""What a damaged, locked or unwritable file raises; UnicodeDecodeError where its schema is no text."""

_LOCK_TIMEOUT_S = 30.0
_FLUSH_ROWS = 1000
_FLUSH_SECONDS = 5.0

MediaFacts = ImageFacts | VideoFacts

_FACTS_ID = f"facts 2 {VIDEO_DECODER_ID}"
_CONTENT_ID = "sha256"


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes with the content of a file, as far as can be told without reading it."""

    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path | str) -> "FileState":
        """The state of a file.

        Raises:
            OSError: there is none, or it cannot be asked.
        """
        stat = os.stat(path)  # noqa: PTH116 - one of a million, and Path.stat costs twice as much
        return cls(stat.st_size, stat.st_mtime_ns)


class FileMemory:
    """A text for each name, valid for one state of the file that it is about; kept in one SQLite file.

    Several processes may use one file. It has no write-ahead log, which needs memory that the processes
    share and so fails on network file systems. Use it as a context manager, or `flush` it.

    Args:
        path: the SQLite file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: dict[str, tuple[FileState, str]] = {}
        self._flushed_at = time.monotonic()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._connect()
        except _BROKEN as error:
            self._connection = self._start_anew(error)

    def __enter__(self) -> "FileMemory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def recall(self, name: str, state: FileState) -> str | None:
        """What is remembered under ``name`` for this state of its file, or None."""
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
        is_due = time.monotonic() - self._flushed_at > _FLUSH_SECONDS
        if is_due or len(self._pending) >= _FLUSH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        rows = [
            (name, state.size, state.mtime_ns, value, _checksum(name, state, value))
            for name, (state, value) in self._pending.items()
        ]

        def write(connection: sqlite3.Connection) -> None:
            with connection:
                connection.executemany("INSERT OR REPLACE INTO memory VALUES (?, ?, ?, ?, ?)", rows)

        if rows:
            self._attempt(write)
        self._pending.clear()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        """Write what is not written yet, and let go of the file."""
        self.flush()
        self._connection.close()

    def _attempt(self, work: Callable[[sqlite3.Connection], _Result]) -> _Result:
        for start_again in (self._start_anew, self._do_without):
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
            # Columns of another version of this file: found now and not in the middle of a run.
            connection.execute("SELECT name, size, mtime_ns, value, checksum FROM memory LIMIT 1")
        except BaseException:
            connection.close()
            raise
        return connection

    def _start_anew(self, error: Exception) -> sqlite3.Connection:
        """A new file in place of a damaged one."""
        logger.warning("%s: the index is started anew: %s", self._path, error)
        try:
            # Not one that is merely locked: others work with it.
            if not isinstance(error, sqlite3.OperationalError) or "no such column" in str(error):
                self._path.unlink(missing_ok=True)
            return self._connect()
        except _BROKEN as again:
            return self._do_without(again)

    def _do_without(self, error: Exception) -> sqlite3.Connection:
        """Memory of this process alone."""
        logger.warning("%s: no index can be kept there, so files are read again: %s", self._path, error)
        connection = sqlite3.connect(":memory:")
        connection.execute(_TABLE)
        return connection


class MediaIndex:
    """Facts and fingerprints of files, remembered as long as size and time of change of a file stay.

    Args:
        memory: where they are remembered.
    """

    def __init__(self, memory: FileMemory) -> None:
        self._memory = memory

    def facts(self, path: Path) -> MediaFacts:
        """What the header of a picture or the packets of a clip tell; nothing is decoded.

        Raises:
            UserError: the file cannot be used.
            OSError: the machine failed to read it.
            MemoryError: there was too little to read it.
        """

        def read() -> str:
            facts = check_video(path) if is_video(path.name) else check_image(path)
            return json.dumps(dataclasses.asdict(facts))

        values = json.loads(self._recall(_FACTS_ID, path, read))
        return VideoFacts(**values) if is_video(path.name) else ImageFacts(**values)

    def content(self, path: Path) -> str:
        """The sha256 of the bytes of a file, in hexadecimal.

        Raises:
            UserError: the file cannot be read.
            OSError: the machine failed to read it.
        """
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


def file_fingerprint(path: Path) -> str:
    """The sha256 of the bytes of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(name: str, state: FileState, value: str) -> bytes:
    """SQLite does not notice a flipped byte in a row."""
    text = f"{name}\0{state.size}\0{state.mtime_ns}\0{value}"
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest()
