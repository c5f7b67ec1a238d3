import json
import logging
import os
import subprocess
import sys

import pytest

from diffsynth_lite.data.metadata import read_metadata_captions
from diffsynth_lite.errors import UserError


@pytest.fixture
def read(tmp_path):
    """Write a metadata file of the given name and content and read the captions of ``images`` from it."""

    def read_captions(name, content, images=("a.png", "b.png"), **columns):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        columns = {"image_column": "file_name", "caption_column": "text"} | columns
        return read_metadata_captions(path, images, **columns)

    return read_captions


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    "caption",
    [
        "NA",
        "null",
        "123",
        "001",
        "1e5",
        "True",
        "2024-01-01",
        "a, b",
        'say "hi"',
        "one\ntwo",
        "é 日本",
        "nan",
    ],
)
def test_captions_come_back_letter_for_letter_from_csv(read, caption):
    quoted = caption.replace('"', '""')
    content = f'file_name,score,text\na.png,1,"{quoted}"\nb.png,x,"{quoted}"\n'
    assert read("metadata.csv", content) == {"a.png": caption, "b.png": caption}


@pytest.mark.parametrize(
    "caption", ["NA", "null", "123", "001", 'say "hi"', "one\ntwo", "é 日本", "a\u2028b"]
)
def test_captions_come_back_letter_for_letter_from_jsonl(read, caption):
    content = lines({"file_name": "a.png", "text": caption, "score": 1}, {"file_name": "b.png", "text": "y"})
    assert read("metadata.jsonl", content) == {"a.png": caption, "b.png": "y"}


@pytest.mark.parametrize("name", ["plain.csv", "with [brackets] * and ::.csv", "upper.CSV"])
def test_the_name_of_the_file_does_not_matter(read, name):
    assert read(name, "\ufefffile_name,text\r\na.png,x\r\n") == {"a.png": "x"}


def test_blank_lines_between_rows_are_skipped(read):
    assert read("m.jsonl", '\n{"file_name": "a.png", "text": "x"}\n\n') == {"a.png": "x"}
    assert read("m.csv", "file_name,text\n\na.png,x\n\n") == {"a.png": "x"}


def test_columns_have_the_names_that_were_given(read):
    content = "image,caption,text\na.png,right,wrong\n"
    assert read("m.csv", content, image_column="image", caption_column="caption") == {"a.png": "right"}


@pytest.mark.parametrize(
    ("name", "content"),
    [("m.csv", "file_name,caption\na.png,x\n"), ("m.jsonl", '{"file_name":"a.png","caption":"x"}')],
)
def test_a_missing_column_is_named_beside_those_that_are_there(read, name, content):
    with pytest.raises(UserError, match=r"needs the columns file_name and text; it has file_name, caption"):
        read(name, content)


def test_all_rows_that_cannot_be_used_are_named_at_once(read):
    content = lines(
        {"file_name": "a.png", "text": "good"},
        {"file_name": "c.png", "text": "no such image"},
        {"file_name": "a.png", "text": "again"},
        {"file_name": None, "text": "x"},
        {"file_name": "b.png", "text": "  "},
    )
    with pytest.raises(UserError) as error:
        read("m.jsonl", content)
    message = str(error.value)
    assert "4 of 5 rows" in message
    for expected in [
        "row 2: 'c.png' is not among the images",
        "row 3: a.png has row 1 already",
        "row 4: 'file_name' is None",
        "row 5: b.png has no text",
    ]:
        assert expected in message


@pytest.mark.parametrize("caption", [5, None, ["x"], {"x": 1}, True, "2024-01-01"])
def test_a_caption_that_json_does_not_give_as_text_is_refused(read, caption):
    with pytest.raises(UserError, match=r"row 1: a\.png has no text in 'text' but"):
        read("m.jsonl", lines({"file_name": "a.png", "text": caption}))


def test_captions_of_mixed_kinds_are_refused_by_row(read):
    with pytest.raises(UserError, match=r"1 of 2 rows .* row 2: b\.png has no text in 'text' but 5"):
        read("m.jsonl", lines({"file_name": "a.png", "text": "x"}, {"file_name": "b.png", "text": 5}))


@pytest.mark.parametrize(
    "image",
    [
        "../a.png",
        "sub/../../a.png",
        "..",
        "/etc/passwd",
        "//host/share/a.png",
        "C:/a.png",
        "C:\\a.png",
        "..\\a.png",
        "\\\\host\\share\\a.png",
        "sub\\a.png",
        "http://host/a.png",
        "https://host/a.png",
        "file:///etc/passwd",
        "s3://bucket/a.png",
        "zip://a.png::b.zip",
        "%2e%2e/a.png",
        "~/a.png",
        "$HOME/a.png",
        "a.png\x00.txt",
        " a.png",
        ".",
        "",
    ],
)
def test_a_row_selects_only_among_the_images_of_the_folder(read, image):
    with pytest.raises(UserError, match="row 1: "):
        read("m.jsonl", lines({"file_name": image, "text": "x"}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.csv", "", "No columns"),
        ("m.csv", "file_name,text\n", "no rows"),
        ("m.jsonl", "", "no rows"),
        ("m.csv", "file_name,text\na.png,red, round\n", "double quotes"),
        ("m.csv", "file_name,text\na.png,x\nb.png,red, round\n", r"line 3.*double quotes"),
        ("m.csv", 'file_name,text\na.png,"open\n', "double quotes"),
        ("m.csv", "file_name,text\na.png\nb.png,x\n", r"row 1: a\.png has no text"),
        ("m.csv", "file_name;text\na.png;x\n", "it has file_name;text"),
        ("m.csv", "file_name,text\na.png,café\n".encode("latin-1"), "utf-8"),
        ("m.csv", "file_name,text\na.png,x\n".encode("utf-16"), "not UTF-8 text"),
        ("m.jsonl", '{"file_name": "a.png", "text": "café"}'.encode("latin-1"), "(?i)utf-?8"),
        ("m.jsonl", '{"file_name": "a.png", "te', "JSON"),
        ("m.jsonl", '{"file_name": "a.png", "text": "x", "text": "y"}', "twice"),
        ("m.jsonl", '{"a": 1}\nnull\n', "line 2 is not a JSON object"),
        ("m.jsonl", '[{"file_name": "a.png", "text": "x"}]', "line 1 is not a JSON object"),
        ("m.parquet", b"PAR1", r"\.jsonl or \.csv"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_named_in_one_line(read, caplog, name, content, message):
    with pytest.raises(UserError, match=message) as error:
        read(name, content)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert not caplog.records


def test_a_missing_metadata_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.csv: no such file"):
        read_metadata_captions(tmp_path / "gone.csv", ["a.png"], image_column="i", caption_column="c")


def test_reading_restores_the_log_level_of_datasets(read, monkeypatch):
    library = logging.getLogger("datasets")
    monkeypatch.setattr(library, "level", logging.ERROR)
    read("m.csv", "file_name,text\na.png,x\n")
    assert library.level == logging.ERROR


def test_nothing_is_left_in_the_home_folder(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "m.csv").write_text("file_name,text\na.png,x\n")
    (tmp_path / "m.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n')
    program = (
        "import sys; from pathlib import Path\n"
        "from diffsynth_lite.data.metadata import read_metadata_captions as read\n"
        "for path in sys.argv[1:]:\n"
        "    captions = read(Path(path), ['a.png'], image_column='file_name', caption_column='text')\n"
        "    assert captions == {'a.png': 'x'}"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    files = [str(tmp_path / name) for name in ("m.csv", "m.jsonl")]
    done = subprocess.run(
        [sys.executable, "-c", program, *files],
        env=kept | {"HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(home.rglob("*")) == []
