"""This file reads captions from metadata.jsonl or metadata.csv and matches its rows to image files.

`datasets` parses, we match: its own image folder drops items, and its type inference changes captions
(``NA`` becomes None, ``001`` becomes 1, a column of dates becomes timestamps). Rows only ever select among
the images that were found, so no row can reach outside the folder, and no URL is fetched.
"""

import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from tempfile import TemporaryDirectory

from datasets import Dataset, Features, Value

from diffsynth_lite.data.images import IMAGE_SUFFIXES
from diffsynth_lite.data.listing import listed
from diffsynth_lite.errors import UserError

Row = dict[str, object]


def read_metadata_captions(
    path: Path, images: Sequence[str], *, image_column: str, caption_column: str
) -> dict[str, str]:
    """Caption of each image that has a row.

    Args:
        path: a .jsonl or .csv file in UTF-8.
        images: names of the image files, relative, with forward slashes.
        image_column: column with the name of the image.
        caption_column: column with the caption.

    Raises:
        UserError: the file cannot be parsed, lacks a column, or holds rows that fit no image, are doubled or
            have no caption; all such rows are named at once.
    """
    rows = _read_rows(path, (image_column, caption_column))
    known = set(images)
    row_of_image: dict[str, int] = {}
    captions: dict[str, str] = {}
    problems: list[str] = []
    for number, row in enumerate(rows, start=1):
        image, caption = row.get(image_column), row.get(caption_column)
        name = str(PurePosixPath(image)) if isinstance(image, str) else ""
        if name not in known:
            problems.append(f"row {number}: {_why_unknown(image, image_column)}")
            continue
        if name in row_of_image:
            problems.append(f"row {number}: {name} has row {row_of_image[name]} already")
        elif not isinstance(caption, str) or not caption.strip():
            problems.append(f"row {number}: {name} has no text in {caption_column!r} but {caption!r}")
        row_of_image.setdefault(name, number)
        captions[name] = str(caption).strip()
    if problems:
        raise UserError(f"{path}: {len(problems)} of {len(rows)} rows cannot be used: {listed(problems)}")
    if not rows:
        raise UserError(f"{path}: no rows; each needs {image_column!r} and {caption_column!r}")
    return captions


def _why_unknown(image: object, image_column: str) -> str:
    if not isinstance(image, str) or not image.strip():
        return f"{image_column!r} is {image!r}, not the name of a file"
    if "://" in image:
        return f"{image!r} is a URL, and none is fetched"
    if ".." in PurePosixPath(image).parts or PureWindowsPath(image).anchor or "\\" in image:
        return f"{image!r} must be relative to the data folder, inside it, with forward slashes"
    return f"{image!r} is not among the images of the data folder ({', '.join(IMAGE_SUFFIXES)} are read)"


def _read_rows(path: Path, columns: tuple[str, str]) -> list[Row]:
    """Rows as `datasets` parses them, with all columns of a csv file as text."""
    parsers = {".jsonl": _parse_jsonl, ".csv": _parse_csv}
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        raise UserError(f"{path}: metadata is read from {' or '.join(parsers)} files")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    with _parsing(path), TemporaryDirectory() as scratch:
        # A copy with a plain name, because `datasets` takes [, ] and * in a path for a pattern; the cache
        # folder is given so that nothing is left in the home folder.
        rows = parse(Path(shutil.copyfile(path, Path(scratch) / "metadata")), scratch)
    found = list(dict.fromkeys(column for row in rows for column in row))
    if rows and not set(columns) <= set(found):
        raise UserError(f"{path}: needs the columns {' and '.join(columns)}; it has {', '.join(found)}")
    return rows


def _parse_jsonl(path: Path, scratch: str) -> list[Row]:
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    for number, line in enumerate(content.split(b"\n"), start=1):
        # Checked first, because pyarrow 26 ends the whole process on a line that is just `null`.
        if line.strip() and not line.lstrip().startswith(b"{"):
            raise ValueError(f"line {number} is not a JSON object in braces")
    if not content.strip():
        return []
    return list(Dataset.from_json(str(path), cache_dir=scratch, streaming=True))


def _parse_csv(path: Path, scratch: str) -> list[Row]:
    if b"\0" in path.read_bytes():
        raise ValueError("holds zero bytes, so it is not UTF-8 text")
    options = {"cache_dir": scratch, "streaming": True, "keep_default_na": False, "index_col": False}
    [header] = Dataset.from_csv(str(path), header=None, nrows=1, **options)
    columns = [column for column in header.values() if isinstance(column, str) and column]
    features = Features({column: Value("string") for column in columns})
    return list(Dataset.from_csv(str(path), features=features, **options))


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Turn what the parsers raise into one UserError, and keep `datasets` from logging it as well."""
    library = logging.getLogger("datasets")
    level = library.level
    library.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            # Without this an unquoted comma in the first caption cuts the captions of all rows short.
            warnings.filterwarnings("error", message="Length of header or names")
            yield
    except (ValueError, Warning) as error:
        hint = "; a text with a comma or a quote needs double quotes" if path.suffix.lower() == ".csv" else ""
        raise UserError(f"{path}: {' '.join(str(error).split())}{hint}") from error
    finally:
        library.setLevel(level)
