"""Texts in the place of a file's name, and the places of data in which they may be."""

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

OUTSIDE = (
    "../secret.png",
    "../../{name}/secret.png",
    "../data/../secret.png",
    "./../secret.png",
    ".//..//secret.png",
    "../data-2/secret.png",
    "../data/a.png",
    "sub/../../secret.png",
    "sub/../a.png",
    "sub/../../data/a.png",
    "missing/../../secret.png",
    "linked/../secret.png",
    "a.png/../../secret.png",
    "archive.zip/../../secret.png",
    "..",
    "../",
    "../" * 300 + "etc/passwd",
    "{root}/secret.png",
    "{root}/data/../secret.png",
    "{root}/data/a.png",
    "//{root}/secret.png",
    "/etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "//host/share/a.png",
    "../" + "a" * 300 + ".png",
    "../\ud800.png",
)
"""Paths with ``..`` and absolute ones, only for ``allow_outside``; many reach a file that is there."""

THROUGH_LINKS = (
    "link.png",
    "link to secret.png",
    "linked/secret.png",
    "sub/link.png",
    "chained.png",
    "loop.png",
    "nothing.png",
)
"""Names of links in the folder that leave it, lead to themselves, or to nothing."""

NO_PATHS = (
    "C:/a.png",
    "C:\\a.png",
    "C:a.png",
    "c:secret.png",
    "\\\\host\\share\\a.png",
    "\\\\?\\C:\\a.png",
    "\\\\.\\pipe\\a.png",
    "..\\secret.png",
    "sub\\..\\..\\secret.png",
    "sub\\e.png",
    "\\secret.png",
    "http://127.0.0.1:9/a.png",
    "https://host/a.png",
    "HTTPS://host/a.png",
    "http:/127.0.0.1/a.png",
    "file://{root}/secret.png",
    "file:{root}/secret.png",
    "ftp://host/a.png",
    "s3://bucket/a.png",
    "hf://datasets/owner/name/a.png",
    "data:image/png;base64,AAAA",
    "zip://a.png::{root}/archive.zip",
    "zip://../secret.png::archive.zip",
    "archive.zip/a.png",
    "archive.zip!/../secret.png",
    "simplecache::http://host/a.png",
    "%2e%2e/secret.png",
    "%2e%2e%2fsecret.png",
    "..%2fsecret.png",
    "%252e%252e%252fsecret.png",
    "..%5csecret.png",
    "..%c0%afsecret.png",
    "&#46;&#46;/secret.png",
    "~/secret.png",
    "~root/.bashrc",
    "$HOME/secret.png",
    "${{HOME}}/secret.png",
    "%USERPROFILE%/secret.png",
    "$(cat secret.png)",
    "`cat secret.png`",
    "a.png|cat",
    "-rf.png",
    "*.png",
    "?.png",
    "[ab].png",
    "{{a,b}}.png",
    "a.png\0",
    "a.png\0.txt",
    "\0",
    "../secret.png\0.png",
    "a.png\n",
    "a.png\n../secret.png",
    "\ta.png",
    " a.png",
    "a.png ",
    "a.png.",
    "a.png::$DATA",
    "a.png:stream",
    "CON",
    "nul.png",
    "\u2024\u2024/secret.png",
    "\u2025/secret.png",
    "\uff0e\uff0e/secret.png",
    "..\u2215secret.png",
    "..\u2044secret.png",
    "..\uff0fsecret.png",
    "..\uff3csecret.png",
    "\u0430.png",
    "a.png\u200b",
    "\u202egnp.a",
    "\ufeffa.png",
    "a\u0301.png",
    "\ud800.png",
    "A.PNG",
    "a" * 300 + ".png",
    "a" * 100_000,
    "/".join(["a"] * 5000),
    ".hidden.png",
    ".hidden/a.png",
    "sub",
    "sub/",
    ".",
    "./",
    "...",
    ".../secret.png",
    "",
    "   ",
)
"""What names no file of the folder, and never may, also where ``allow_outside`` is set."""


def plant(root: Path) -> Path:
    """Make the folder ``data`` with ``a.png`` and others below ``root``, and secrets around it."""
    data = root / "data"
    names = ("a.png", "b.png", "c.mp4", "d.mp4", "sub/e.png", "notes.txt", ".hidden.png", ".hidden/a.png")
    for path in (*(data / name for name in names), *secrets(root)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    for name, target in {
        "link.png": "../secret.png",
        "link to secret.png": str(root / "secret.png"),
        "sub/link.png": "../../data-2/secret.png",
        "linked": "../data-2",
        "chained.png": "link.png",
        "loop.png": "loop.png",
        "nothing.png": "../gone.png",
    }.items():
        (data / name).symlink_to(target)
    return data


def secrets(root: Path) -> list[Path]:
    """The files around the folder ``data`` that nothing in it may reach."""
    return [root / name for name in ("secret.png", "data-2/secret.png", "archive.zip")]


def written_out(text: str, root: Path) -> str:
    """A text of this corpus for data below ``root``."""
    return text.format(root=root, name=root.name)


Read = Callable[[Path, str], list[Record]]
_IMAGE, _CLIP = {"file_name": "b.png"}, {"file_name": "c.mp4"}


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
    "input": _in_jsonl(_IMAGE, "input", input_columns=["input"]),
    "list of inputs": _in_jsonl(_IMAGE, "input", in_list=True, input_columns=["input"]),
    "mask": _in_jsonl(_IMAGE, "mask", mask_column="mask"),
    "control clip": _in_jsonl(_CLIP, "guide", control_column="guide"),
    "inpaint mask": _in_jsonl(_IMAGE, "hole", inpaint_mask_column="hole"),
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
