"""The places in which data give file names, each as data with a text there, read as a run reads them."""

import csv
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, Features, Image, List, Value, Video

from diffsynth_lite.data.captions import is_unicode
from diffsynth_lite.data.records import Record, Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError

Read = Callable[[Path, str], list[Record]]
_PICTURE, _CLIP = {"file_name": "b.png"}, {"file_name": "c.mp4"}


def escapes(read: Read, root: Path, text: str, *, may_be_inside: bool) -> bool:
    """Whether data that give a text as a file's name are accepted with a file that is not theirs.

    Args:
        read: one of the places below.
        root: folder that `plant` has filled.
        text: given there.
        may_be_inside: whether the text may name a file of the folder.
    """
    try:
        records = read(root, text)
    except UserError:
        return False
    theirs = tuple((root / name).resolve() for name in ("data", "store"))
    return not may_be_inside or any(
        not any(path.resolve().is_relative_to(folder) for folder in theirs)
        for record in records
        for path in record.files
    )


def _read(source: Source, root: Path) -> list[Record]:
    return list(find_records([source], media_store=root / "store").require_all())


def _jsonl(path: Path, row: Mapping[str, object]) -> Path:
    path.write_text(json.dumps({"text": "x"} | dict(row)) + "\n")
    return path


def _in_jsonl(row: Mapping[str, object], column: str, *, in_list: bool = False, **settings: Any) -> Read:
    def read(root: Path, text: str) -> list[Record]:
        named = dict(row) | {column: [text] if in_list else text}
        metadata = _jsonl(root / "rows.jsonl", named)
        return _read(Source(path=root / "data", metadata=metadata, **settings), root)

    return read


def _in_the_folders_own_rows(root: Path, text: str) -> list[Record]:
    own = _jsonl(root / "data" / "metadata.jsonl", {"file_name": text})
    try:
        return _read(Source(path=root / "data"), root)
    finally:
        own.unlink()


def _in_csv(root: Path, text: str) -> list[Record]:
    metadata = root / "rows.csv"
    with metadata.open("w", encoding="utf-8", errors="surrogatepass", newline="") as file:
        csv.writer(file).writerows([("file_name", "text"), (text, "x")])
    return _read(Source(path=root / "data", metadata=metadata), root)


def _in_parquet(root: Path, text: str) -> list[Record]:
    rows = pyarrow.Table.from_pylist([{"file_name": text, "text": "x"}])
    pyarrow.parquet.write_table(rows, root / "rows.parquet")
    return _read(Source(path=root / "data", metadata=root / "rows.parquet"), root)


def _in_dataset(feature: Any, *, in_list: bool = False, below_folder: bool = False) -> Read:
    def read(root: Path, text: str) -> list[Record]:
        cell = {"bytes": None, "path": f"{root / 'data'}/{text}" if below_folder else text}
        rows = Dataset.from_dict(
            {"image": [{"bytes": b"\x89PNG\r\n\x1a\n", "path": None} if in_list else cell], "text": ["x"]}
            | ({"input": [[cell]]} if in_list else {}),
            features=Features(
                {"image": Image() if in_list else feature, "text": Value("string")}
                | ({"input": List(feature)} if in_list else {})
            ),
        )
        columns = {"input_columns": ["input"]} if in_list else {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
            patch.setattr(datasets.config, "HF_DATASETS_CACHE", root / "hub")
            return _read(Source(dataset=str(root / "data"), media_column="image", **columns), root)

    return read


ROWS: dict[str, Read] = {
    "file_name in jsonl": _in_jsonl({}, "file_name"),
    "file_name in the folder's own metadata": _in_the_folders_own_rows,
    "file_name in csv": _in_csv,
    "file_name in parquet": _in_parquet,
    "input": _in_jsonl(_PICTURE, "input", input_columns=["input"]),
    "list of inputs": _in_jsonl(_PICTURE, "input", in_list=True, input_columns=["input"]),
    "mask": _in_jsonl(_PICTURE, "mask", mask_column="mask"),
    "control clip": _in_jsonl(_CLIP, "guide", control_column="guide"),
    "inpaint mask": _in_jsonl(_PICTURE, "hole", inpaint_mask_column="hole"),
    "first frame": _in_jsonl(_CLIP, "frame", first_frame_column="frame"),
    "last frame": _in_jsonl(_CLIP, "frame", last_frame_column="frame"),
}
"""Rows that name files; what a text of the corpus names there is refused."""

DATASETS: dict[str, Read] = {
    "image of a dataset": _in_dataset(Image()),
    "image below the folder of a dataset": _in_dataset(Image(), below_folder=True),
    "list of images of a dataset": _in_dataset(Image(), in_list=True),
    "clip of a dataset": _in_dataset(Video()),
}
"""Columns of `datasets`, which name files as the system does; some texts then name files of the folder."""


def can_hold(place: str, text: str) -> bool:
    """Whether a text can be written in a place at all: the tables of Arrow hold valid UTF-8 only."""
    return is_unicode(text) or place not in ("file_name in parquet", *DATASETS)
