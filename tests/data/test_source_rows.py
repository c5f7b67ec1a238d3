import json
import logging

import pytest

from diffsynth_lite.data.records import Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError

UNREADABLE = ["notes.txt", ["a.png"], {"bytes": "x", "path": "a.png"}, 7]


@pytest.fixture
def read(tmp_path):
    """Read rows, written as jsonl, that name files of a folder with a few empty ones."""
    names = [
        "a.png",
        "b.png",
        "c.mp4",
        "d.mp4",
        "sub/e.png",
        "in/1.png",
        "in/2.png",
        "notes.txt",
        ".hidden.png",
    ]
    for name in names:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "a.png").write_bytes(b"")

    def read_rows(*rows, **settings):
        metadata = tmp_path / "rows.jsonl"
        metadata.write_text("".join(json.dumps({"text": "x"} | row) + "\n" for row in rows))
        source = Source(path=tmp_path / "data", metadata=metadata, **settings)
        return find_records([source], media_store=tmp_path / "unused").require_all()

    return read_rows


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("settings", [{}, {"input_columns": ["input"]}, {"mask_column": "input"}])
def test_a_row_names_images_by_their_names(read, name, settings):
    row = {"file_name": "b.png", "input": name} if settings else {"file_name": name, "input": "b.png"}
    if name == ["a.png"] and "input_columns" in settings:
        settings = {"mask_column": "input"}  # A list of inputs is meant so.
    with pytest.raises(UserError, match="row 1: ") as error:
        read(row, **settings)
    assert "\n" not in str(error.value)


def test_a_row_reaches_outside_where_that_is_allowed(read, tmp_path):
    rows = [{"file_name": "../a.png"}, {"file_name": str(tmp_path / "data" / "b.png")}]
    records = read(*rows, allow_outside=True)
    assert [record.name for record in records] == ["../a.png", str(tmp_path / "data" / "b.png")]
    assert all(record.target.is_file() for record in records)
    with pytest.raises(UserError, match=r"'../gone\.png': no such file"):
        read({"file_name": "../gone.png"}, allow_outside=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("http://host/a.png", "is a URL, and none is fetched"),
        ("/etc/passwd", "must be relative to .* or set allow_outside"),
        ("C:/a.png", "without drive"),
        ("gone.png", "is not among the files of"),
        ("notes.txt", r"neither image nor clip; \.png, .*\.mp4"),
        (None, "None is not the name of a file"),
    ],
)
def test_the_reason_says_what_is_wrong_with_the_name(read, name, reason):
    with pytest.raises(UserError, match=rf"rows\.jsonl: 1 of 2 items .*: row 2: .*{reason}"):
        read({"file_name": "a.png"}, {"file_name": name})


def test_several_columns_and_lists_give_several_captions(read):
    rows = [
        {"file_name": "a.png", "text": ["one", "two"], "short": "three"},
        {"file_name": "b.png", "text": None, "short": "four"},
    ]
    records = read(*rows, caption_columns=["text", "short"], trigger="sks")
    assert [record.captions for record in records] == [("sks, one", "sks, two", "sks, three"), ("sks, four",)]


def test_inputs_stand_in_columns_and_in_lists(read, tmp_path):
    rows = [
        {"file_name": "a.png", "first": "in/1.png", "more": ["in/2.png", "b.png"]},
        {"file_name": "sub/e.png", "first": "in/2.png", "more": ""},
    ]
    first, second = read(*rows, input_columns=["first", "more"])
    folder = tmp_path / "data"
    assert first.inputs == (folder / "in/1.png", folder / "in/2.png", folder / "b.png")
    assert second.inputs == (folder / "in/2.png",)
    assert (first.kind, second.kind) == ("edit", "edit")


def test_frames_and_masks_stand_in_columns(read, tmp_path):
    row = {"file_name": "c.mp4", "start": "a.png", "end": "b.png", "weight": "in/1.png"}
    columns = {"first_frame_column": "start", "last_frame_column": "end", "mask_column": "weight"}
    [record] = read(row, **columns)
    assert record.kind == "image_to_video"
    folder = tmp_path / "data"
    assert record.files == (folder / "c.mp4", folder / "a.png", folder / "b.png", folder / "in/1.png")


@pytest.mark.parametrize(
    ("row", "settings", "reason"),
    [
        ({"file_name": "b.png", "x": None}, {"input_columns": ["x"]}, "no input in 'x'"),
        ({"file_name": "b.png", "x": []}, {"input_columns": ["x"]}, "no input in 'x'"),
        (
            {"file_name": "b.png", "x": ["a.png", None]},
            {"input_columns": ["x"]},
            "'x': None is not the name",
        ),
        ({"file_name": "b.png", "x": "c.mp4"}, {"input_columns": ["x"]}, r"'x': c\.mp4 is not an image"),
        ({"file_name": "b.png", "x": None}, {"mask_column": "x"}, "'x': None is not the name of a file"),
        ({"file_name": "d.mp4", "x": "a.png"}, {"input_columns": ["x"]}, "is a clip, and only images"),
        ({"file_name": "b.png", "x": "a.png"}, {"first_frame_column": "x"}, "is an image, and only clips"),
        ({"file_name": "b.png", "x": "a.png"}, {"last_frame_column": "x"}, "is an image, and only clips"),
        (
            {"file_name": "b.png", "x": "c.mp4"},
            {"control_column": "x"},
            r"'x': c\.mp4 is not an image; \.png",
        ),
        ({"file_name": "c.mp4", "x": "a.png"}, {"control_column": "x"}, r"'x': a\.png is not a clip; \.mp4"),
        ({"file_name": "b.png", "x": "c.mp4"}, {"inpaint_mask_column": "x"}, r"'x': c\.mp4 is not an image"),
        ({"file_name": "c.mp4", "x": "notes.txt"}, {"inpaint_mask_column": "x"}, "is not an image or a clip"),
    ],
)
def test_each_row_has_what_its_source_pairs(read, row, settings, reason):
    kind = "c.mp4" if "frame" in next(iter(settings)) else "a.png"
    with pytest.raises(UserError, match=f"1 of 2 items cannot be used: row 2: .*{reason}"):
        read({"file_name": kind, "x": "in/1.png"}, row, **settings)


def test_all_that_is_wrong_with_a_row_is_said_at_once(read):
    row = {"file_name": "a.png", "text": "", "x": "gone.png"}
    with pytest.raises(
        UserError, match=r"row 1: no text in 'text' but '', and 'x': 'gone\.png' is not among"
    ):
        read(row, input_columns=["x"])


def test_wrong_columns_are_named_with_those_that_are_there(read):
    with pytest.raises(UserError, match="has no column image and input; it has text, file_name"):
        read({"file_name": "a.png"}, media_column="image", input_columns=["input"])


def test_files_that_other_rows_use_are_not_called_left_out(read, caplog):
    row = {"file_name": "a.png", "x": ["in/1.png", "in/2.png"]}
    with caplog.at_level(logging.WARNING):
        read(row, input_columns=["x"])
    assert "4 of 7 files have no row and are left out: b.png; c.mp4; d.mp4; sub/e.png" in caplog.text
