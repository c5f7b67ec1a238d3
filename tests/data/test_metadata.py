import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from diffsynth_lite.data.metadata import read_table
from diffsynth_lite.data.records import Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError


@pytest.fixture
def read(tmp_path):
    """Write a metadata file of the given name and content and read the captions of two images from it."""
    for image in ["a.png", "b.png"]:
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / image).write_bytes(b"")

    def read_captions(name, content, **settings):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        source = Source(path=tmp_path / "data", metadata=path, **settings)
        records = find_records([source], media_store=tmp_path / "unused").require_all()
        return {record.name: record.captions[0] for record in records}

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
    assert read("m.csv", content, media_column="image", caption_columns=["caption"]) == {"a.png": "right"}


@pytest.mark.parametrize(
    ("name", "content"),
    [("m.csv", "file_name,caption\na.png,x\n"), ("m.jsonl", '{"file_name":"a.png","caption":"x"}')],
)
def test_a_missing_column_is_named_beside_those_that_are_there(read, name, content):
    with pytest.raises(UserError, match=r"has no column text; it has file_name, caption"):
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
    assert "4 of 5 items" in message
    for expected in [
        "row 2: 'c.png' is not among the files",
        "row 3: a.png has row 1 already",
        "row 4: None is not the name of a file",
        "row 5: no text in 'text' but '  '",
    ]:
        assert expected in message


@pytest.mark.parametrize("caption", [5, None, [5], [" "], [["x"]], {"x": 1}, True])
def test_a_caption_that_json_does_not_give_as_text_is_refused(read, caption):
    with pytest.raises(UserError, match=r"row 1: no text in 'text' but"):
        read("m.jsonl", lines({"file_name": "a.png", "text": caption}))


def test_captions_of_mixed_kinds_are_refused_by_row(read):
    with pytest.raises(UserError, match=r"1 of 2 items .* row 2: no text in 'text' but 5"):
        read("m.jsonl", lines({"file_name": "a.png", "text": "x"}, {"file_name": "b.png", "text": 5}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.csv", "", "its first line must name the columns"),
        ("m.csv", "file_name,text\n", "no rows"),
        ("m.jsonl", "", "no rows"),
        ("m.csv", "file_name,text\na.png,red, round\n", "line 2: 3 cells instead of 2; .* double quotes"),
        ("m.csv", "file_name,text\na.png,x\nb.png,red, round\n", r"line 3: 3 cells.*double quotes"),
        ("m.csv", 'file_name,text\na.png,"open\nb.png,x\n', "line 2: .*double quotes"),
        ("m.csv", "file_name,text\na.png\nb.png,x\n", "line 2: 1 cells instead of 2"),
        ("m.csv", "file_name,text,text\na.png,x,y\n", "has the column text twice"),
        ("m.csv", "file_name,text\ra.png,x\r", "new-line character"),
        ("m.csv", "file_name;text\na.png;x\n", "it has file_name;text"),
        ("m.csv", "file_name,text\na.png,café\n".encode("latin-1"), "line 2: not UTF-8"),
        ("m.csv", "file_name,text\na.png,x\n".encode("utf-16"), "not UTF-8 text"),
        ("m.jsonl", '{"file_name": "a.png", "text": "café"}'.encode("latin-1"), "line 1: not UTF-8"),
        ("m.jsonl", '{"file_name": "a.png", "te', "line 1: Unterminated string"),
        ("m.jsonl", '{"file_name": "a.png", "text": "x", "text": "y"}', "twice"),
        ("m.jsonl", '{"a": 1}\nnull\n', "line 2 is not a JSON object"),
        ("m.jsonl", '[{"file_name": "a.png", "text": "x"}]', "line 1 is not a JSON object"),
        ("m.jsonl", "[" * 100_000, "recursion"),
        ("m.parquet", b"PAR1", "(?i)parquet"),
        ("m.json", "{}", r"read from \.jsonl, \.csv, \.parquet files"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_named_in_one_line(read, caplog, name, content, message):
    with pytest.raises(UserError, match=message) as error:
        read(name, content)
    assert name in str(error.value)
    assert "\n" not in str(error.value)
    assert not caplog.records


def test_a_missing_metadata_file_is_named(tmp_path):
    source = Source(path=tmp_path, metadata=tmp_path / "gone.csv")
    with pytest.raises(UserError, match=r"gone\.csv: No such file"):
        find_records([source], media_store=tmp_path).require_all()


def test_reading_text_formats_loads_no_table_library(tmp_path):
    (tmp_path / "m.csv").write_text("file_name,text\na.png,x\n")
    program = (
        "import sys; from pathlib import Path\n"
        "from diffsynth_lite.data.metadata import read_table\n"
        "table = read_table(Path(sys.argv[1]), ['text', 'file_name'])\n"
        "assert table.columns == {'text': ['x'], 'file_name': ['a.png']}\n"
        "print(*{'datasets', 'pandas', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m.csv")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("name", ["m.jsonl", "m.csv", "m.parquet"])
def test_all_formats_give_the_same_columns(tmp_path, name):
    rows = [
        {"file_name": "a.png", "text": "é, 001", "more": "x"},
        {"file_name": "b.png", "text": "NA", "more": ""},
    ]
    path = tmp_path / name
    if name == "m.csv":
        path.write_text('more,text,file_name\nx,"é, 001",a.png\n,NA,b.png\n', encoding="utf-8")
    elif name == "m.jsonl":
        path.write_text(lines(*rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    table = read_table(path, ["file_name", "text"])
    assert table.columns == {"file_name": ["a.png", "b.png"], "text": ["é, 001", "NA"]}
    assert table.num_rows == 2


def test_a_parquet_column_with_bytes_is_no_list_of_files(read, tmp_path):
    rows = [{"file_name": {"bytes": b"x", "path": "a.png"}, "text": "x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "m.parquet")
    with pytest.raises(UserError, match=r"'file_name' holds struct<.*as a dataset"):
        read("m.parquet", (tmp_path / "m.parquet").read_bytes())


def test_a_parquet_file_lacks_a_column(read, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"file": "a.png"}]), tmp_path / "m.parquet")
    with pytest.raises(UserError, match="has no column file_name and text; it has file"):
        read("m.parquet", (tmp_path / "m.parquet").read_bytes())
