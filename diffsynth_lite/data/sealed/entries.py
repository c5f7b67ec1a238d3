"""This file keeps the entries of a sealed cache in a folder, on a disk or on object storage, through Lance.

A row of the Lance dataset is a key, the text if the entry is that of a caption, and the bytes of the entry's
file. Rows are in the order of their keys, which the mapped table has, too: a key is found there by bisection.
The dataset is in a few large files, its shards.
"""

import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from torch import Tensor

from diffsynth_lite.data.batches import EntryReader
from diffsynth_lite.data.cache import parse_entry
from diffsynth_lite.data.item_table import KEY_BYTES, Column
from diffsynth_lite.data.sealed.mapped import DamagedSealError
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import replacing, sync

if TYPE_CHECKING:  # 24 MiB, which a run without a seal does not need
    import pyarrow as pa

LANCE_ERRORS = (OSError, ValueError, RuntimeError)
"""Errors of Lance for a file that is missing, damaged or out of reach."""


def import_lance() -> Any:
    """The package of Lance, imported where a sealed cache is used: it takes a second or two."""
    try:
        import lance
        import lance.file
    except ImportError as error:
        raise UserError(
            f"data.sealed: needs the package pylance, which cannot be imported ({error}): "
            "pip install 'diffsynth_lite[lance]'"
        ) from None
    return lance


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except LANCE_ERRORS as error:
        raise UserError(f"data.sealed: {what}: {first_line(error)}") from error


class SealFolder:
    """A folder by its path, or by its URI on object storage that Lance has a connector for.

    Args:
        location: the value of ``data.sealed``.
    """

    def __init__(self, location: str) -> None:
        self.is_local = "://" not in location
        self.location = str(Path(location).expanduser().absolute()) if self.is_local else location.rstrip("/")

    def __str__(self) -> str:
        return self.location

    def uri(self, name: str) -> str:
        """Where a file or dataset in it is, for Lance."""
        return f"{self.location}/{name}"

    @cached_property
    def _session(self) -> Any:
        lance = import_lance()
        with _explained(f"{self} cannot be used"):
            return lance.file.LanceFileSession(self.location)

    def names(self) -> list[str]:
        """All files in it and below, relative to it; none where it does not exist."""
        if self.is_local and not Path(self.location).exists():
            return []
        session = self._session
        with _explained(f"{self} cannot be read"):
            return sorted(session.list())

    def read(self, name: str) -> bytes | None:
        """Content of a file, or None where there is none."""
        if self.is_local and not Path(self.location).exists():
            return None
        session = self._session
        with _explained(f"{self.uri(name)} cannot be read"), tempfile.TemporaryDirectory() as folder:
            if not session.contains(name):
                return None
            copy = Path(folder) / "copy"
            session.download_file(name, str(copy))
            return copy.read_bytes()

    def download(self, name: str, path: Path) -> None:
        """Copy a file to ``path``, which appears whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        session = self._session
        with _explained(f"{self.uri(name)} cannot be copied to {path}"), replacing(path) as temporary:
            session.download_file(name, str(temporary))
            sync(temporary)

    def make(self) -> None:
        """Create the folder if it is on a disk."""
        try:
            if self.is_local:
                Path(self.location).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"data.sealed: {self} cannot be made: {error.strerror}") from error

    def upload(self, path: Path, name: str) -> None:
        """Copy a file into it."""
        self._session.upload_file(str(path), name)

    def delete(self, names: Sequence[str]) -> None:
        """Remove files."""
        for name in names:
            self._session.delete_file(name)

    def sync(self) -> None:
        """Wait until all files of a folder on a disk are written to it."""
        if self.is_local:
            root = Path(self.location)
            for name in self.names():
                sync(root / name)
            for folder in (*(path for path in root.rglob("*") if path.is_dir()), root, root.parent):
                sync(folder)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Scope in which a panic of Lance, not an ``Exception``, is an OSError: damaged files cause some."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a module that cannot be imported
            raise
        raise OSError(f"Lance: {error}") from error


def first_line(error: BaseException) -> str:
    """Lance's message, without the position in its own source code."""
    return str(error).splitlines()[0].partition(", /")[0] if str(error) else type(error).__name__


_SHARD_BYTES = 4 * 2**30
"""Size of an object that a store takes in one upload of few parts; 50 TB are 12,000 objects."""
_BATCH_BYTES = 32 * 2**20
_BATCH_ROWS = 4096
_REMEDY = (
    "`diffsynth-lite cache verify` lists all that is damaged; restore it from a copy, or seal again into "
    "another folder"
)
_FORMAT = "2.1"
"""Version of Lance's file format: newer versions of the package read it, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryShard:
    """A file of the dataset: its name below ``data/``, its rows, and its size in bytes."""

    file: str
    num_rows: int
    num_bytes: int


def write_entries(
    uri: str, keys: Column, texts: Mapping[str, str], content_of: Callable[[str], bytes]
) -> list[EntryShard]:
    """Write the rows of all ``keys``; some tens of megabytes of them are held at a time.

    Args:
        uri: of the dataset, which must not exist.
        keys: of all entries, ascending.
    """
    lance = import_lance()
    import pyarrow as pa

    schema = pa.schema(
        [
            pa.field("key", pa.binary(KEY_BYTES), nullable=False),
            pa.field("text", pa.string()),
            # Latents and embeddings do not compress.
            pa.field(
                "entry", pa.large_binary(), nullable=False, metadata={"lance-encoding:compression": "none"}
            ),
        ]
    )
    failures: list[BaseException] = []
    is_stopped = Event()

    def read(key: str) -> bytes:
        if is_stopped.is_set():
            raise InterruptedError("the sealing was stopped")
        return content_of(key)

    def batches() -> Iterator["pa.RecordBatch"]:
        try:
            for rows in _batches(keys, texts, read):
                columns = zip(*rows, strict=True)
                arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except BaseException as error:
            failures.append(error)
            raise

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    # Ctrl-C ends Lance's call on the main thread but not its reading thread, and the interpreter would abort
    # if it exited first. Leaving this scope waits for both.
    with ThreadPoolExecutor(1) as thread:
        try:
            writing = thread.submit(
                lance.write_dataset,
                reader,
                uri,
                mode="create",
                max_bytes_per_file=_SHARD_BYTES,
                data_storage_version=_FORMAT,
            )
            dataset = writing.result()
        except LANCE_ERRORS:
            if failures:  # Lance keeps only the error's text.
                raise failures[0] from None
            raise
        finally:
            is_stopped.set()
    return [
        EntryShard(file=file.path, num_rows=fragment.physical_rows, num_bytes=file.file_size_bytes)
        for fragment in dataset.get_fragments()
        for file in fragment.data_files()
    ]


def _batches(
    keys: Column, texts: Mapping[str, str], content_of: Callable[[str], bytes]
) -> Iterator[list[tuple[bytes, str | None, bytes]]]:
    rows: list[tuple[bytes, str | None, bytes]] = []
    num_bytes = 0
    for place in range(len(keys) // KEY_BYTES):
        packed = keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]
        content = content_of(packed.hex())
        rows.append((packed, texts.get(packed.hex()), content))
        num_bytes += len(content)
        if num_bytes >= _BATCH_BYTES or len(rows) == _BATCH_ROWS:
            yield rows
            rows, num_bytes = [], 0
    if rows:
        yield rows


class SealedEntries:
    """Reads the entries of a sealed cache, each by its row.

    A process that receives one opens the dataset itself: Lance has threads, which do not survive a fork.
    """

    def __init__(self, uri: str, keys: Column, shards: tuple[EntryShard, ...]) -> None:
        self.uri, self._keys, self._shards = uri, keys, shards
        self._opened: Any = None

    def __reduce__(self) -> tuple[type["SealedEntries"], tuple[str, Column, tuple[EntryShard, ...]]]:
        return SealedEntries, (self.uri, self._keys, self._shards)

    def __len__(self) -> int:
        return len(self._keys) // KEY_BYTES

    def __contains__(self, key: str) -> bool:
        return self._row(key) is not None

    def read(self, key: str) -> dict[str, Tensor]:
        """Tensors of an entry on the CPU."""
        row = self._require_row(key)
        try:
            return parse_entry(key, self._cell(row, "entry"))
        except ValueError as error:
            raise DamagedSealError(
                f"data.sealed: {self.where(row)} is damaged: {error}; {_REMEDY}"
            ) from error

    def before(self, other: EntryReader) -> EntryReader:
        """Reader that takes entries missing in the seal from ``other``."""
        return _FirstOf(self, other)

    def text(self, key: str) -> str:
        """The caption of an entry."""
        return str(self._cell(self._require_row(key), "text"))

    def where(self, row: int) -> str:
        """The row and its shard, for messages."""
        first = 0
        for shard in self._shards:
            if row < first + shard.num_rows:
                return f"row {row} of {self.uri}, in data/{shard.file}"
            first += shard.num_rows
        return f"row {row} of {self.uri}"

    def problems(self, progress: Callable[[int, int], None]) -> Iterator[str]:
        """All damage, one line each; reads everything.

        Args:
            progress: called with the number of rows read, and of all rows.
        """
        row = 0
        for number, shard in enumerate(self._shards):
            end = row + shard.num_rows
            try:
                for batch in self._rows_of(number):
                    yield from self._problems_of(batch, row)
                    row += len(batch)
                    progress(row, len(self))
                if row != end:
                    raise ValueError(f"{shard.num_rows - end + row} of its {shard.num_rows} rows are there")
            except DamagedSealError as error:
                yield f"{self.uri}, data/{shard.file}: its rows cannot be compared: {error}"
            except LANCE_ERRORS as error:
                yield f"{self.uri}, data/{shard.file}: cannot be read: {first_line(error)}"
            row = end

    def _rows_of(self, shard: int) -> Iterator["pa.RecordBatch"]:
        with panics_as_errors():
            fragment = self._dataset().get_fragment(shard)
            if fragment is None:
                raise ValueError("the dataset does not know it")
            yield from fragment.to_batches(columns=["key", "entry"])

    def _problems_of(self, batch: "pa.RecordBatch", first: int) -> Iterator[str]:
        columns = (batch.column(name).to_pylist() for name in ("key", "entry"))
        for row, (packed, content) in enumerate(zip(*columns, strict=True), start=first):
            try:
                if packed != self._key_at(row):
                    raise ValueError("its key is not the one in the table")
                parse_entry(packed.hex(), content)
            except ValueError as error:
                yield f"{self.where(row)}: {error}"

    def _require_row(self, key: str) -> int:
        row = self._row(key)
        if row is None:
            raise DamagedSealError(f"data.sealed: {self.uri} has no entry {key}; {_REMEDY}")
        return row

    def _row(self, key: str) -> int | None:
        packed = bytes.fromhex(key)
        row = bisect_left(range(len(self)), packed, key=self._key_at)
        return row if row < len(self) and self._key_at(row) == packed else None

    def _key_at(self, row: int) -> bytes:
        return self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]

    def _cell(self, row: int, column: str) -> Any:
        try:
            with panics_as_errors():
                return self._dataset().take([row], columns=[column]).column(0)[0].as_py()
        except LANCE_ERRORS as error:
            raise DamagedSealError(
                f"data.sealed: {self.where(row)} cannot be read: {first_line(error)}; {_REMEDY}"
            ) from error

    def _dataset(self) -> Any:
        if self._opened is None:
            self._opened = import_lance().dataset(self.uri)
        return self._opened


class _FirstOf:
    """Reads entries of a seal, and all others from another reader."""

    def __init__(self, sealed: SealedEntries, other: EntryReader) -> None:
        self._sealed, self._other = sealed, other

    def read(self, key: str) -> dict[str, Tensor] | None:
        return self._sealed.read(key) if key in self._sealed else self._other.read(key)
