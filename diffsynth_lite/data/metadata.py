"""This file parses metadata.jsonl, .csv and .parquet into columns, and guesses nothing.

The standard library reads the two text formats: type inference changes captions (``NA`` becomes None, ``001``
becomes 1, dates become timestamps), and the csv reader of pyarrow 26 takes all rows after a quote that nobody
closed for one caption.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffsynth_lite.errors import UserError

_CSV_HINT = "a text with a comma, a quote or several lines needs double quotes around it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of metadata.

    Attributes:
        columns: name to the cells of all rows.
        first_row: number of the first row, as people count in files of this kind.
    """

    where: str
    columns: Mapping[str, Sequence[object]]
    first_row: int = 1


def read_table(path: Path, columns: Sequence[str]) -> Table:
    """The wanted columns of a metadata file.

    Args:
        path: a .jsonl or .csv file in UTF-8, or a .parquet file.
        columns: their names, each once. A cell of csv is text; in the other formats it can also be a list or
            null.
    """
    parsers = {".jsonl": _parse_jsonl, ".csv": _parse_csv, ".parquet": _parse_parquet}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise UserError(f"{path}: metadata is read from {', '.join(parsers)} files")
    if path.exists() and not path.is_file():  # Opening a named pipe would wait for a writer.
        raise UserError(f"{path}: is not a file that metadata can be read from")
    try:
        cells = parse(path, columns)
    except UserError:
        raise
    except (csv.Error, ValueError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    if not cells[columns[0]]:
        raise UserError(f"{path}: no rows; each needs {' and '.join(map(repr, columns))}")
    return Table(where=str(path), columns=cells)


def require_columns(where: str, wanted: Sequence[str], found: Sequence[str]) -> None:
    """Refuse a table that lacks a column or has it twice."""
    if missing := [column for column in wanted if column not in found]:
        raise UserError(f"{where}: has no column {' and '.join(missing)}; it has {', '.join(found)}")
    if doubled := [column for column in wanted if found.count(column) > 1]:
        raise UserError(f"{where}: has the column {' and '.join(doubled)} twice")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines with their ends, without a byte order mark."""
    with path.open("rb") as file:
        for number, content in enumerate(file, start=1):
            try:
                line = content.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"line {number}: not UTF-8 text") from error
            if "\0" in line:
                raise ValueError(f"line {number}: not UTF-8 text, it holds zero bytes")
            yield number, line


def _parse_jsonl(path: Path, columns: Sequence[str]) -> dict[str, list[object]]:
    cells: dict[str, list[object]] = {column: [] for column in columns}
    found: dict[str, None] = {}
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_without_doubles)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object in braces")
        found.update(dict.fromkeys(row))
        for column, values in cells.items():
            values.append(row.get(column))
    if found:
        require_columns(str(path), columns, list(found))
    return cells


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("holds a key twice")
    return row


def _parse_csv(path: Path, columns: Sequence[str]) -> dict[str, list[object]]:
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    header = next(reader, None)
    if header is None:
        raise ValueError("empty; its first line must name the columns")
    require_columns(str(path), columns, header)
    places = [header.index(column) for column in columns]
    cells: dict[str, list[object]] = {column: [] for column in columns}
    start = reader.line_num + 1
    try:
        for row in reader:
            start, line = reader.line_num + 1, start
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(f"line {line}: {len(row)} cells instead of {len(header)}; {_CSV_HINT}")
            for place, values in zip(places, cells.values(), strict=True):
                values.append(row[place])
    except csv.Error as error:
        raise ValueError(f"line {start}: {error}; {_CSV_HINT}") from error
    return cells


def _parse_parquet(path: Path, columns: Sequence[str]) -> dict[str, list[object]]:
    from pyarrow.parquet import ParquetFile  # Here, because most folders need none of it.

    with ParquetFile(path) as file:
        require_columns(str(path), columns, file.schema_arrow.names)
        for column in columns:
            kind = str(file.schema_arrow.field(column).type)
            if "binary" in kind or "struct" in kind:
                raise ValueError(f"{column!r} holds {kind}, not text; read media inside tables as a dataset")
        table = file.read(columns=list(columns))
    return {column: table.column(column).to_pylist() for column in columns}
