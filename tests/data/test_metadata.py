"""Metadata files and captions are read as they are written, or refused."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from diffsynth_lite.data.captions import (
    MAX_CAPTION_BYTES,
    TagCounts,
    captions_in,
    clean_caption,
    count_tags,
    has_trigger,
    tag_variants,
    with_trigger,
)
from diffsynth_lite.data.metadata import read_table
from diffsynth_lite.data.records import Record, Source
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


CAPTIONS = (
    *("NA", "null", "123", "001", "1e5", "True", "2024-01-01", "a, b", 'say "hi"', "one\ntwo", "é 日本"),
    *("nan", "a\u2028b"),
)


@pytest.mark.parametrize("caption", CAPTIONS)
def test_captions_come_back_letter_for_letter(read, caption):
    quoted = caption.replace('"', '""')
    content = f'file_name,score,text\na.png,1,"{quoted}"\nb.png,x,"{quoted}"\n'
    assert read("metadata.csv", content) == {"a.png": caption, "b.png": caption}
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
def test_a_missing_column_is_named_with_those_that_are_there(read, name, content):
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


def test_a_parquet_column_with_bytes_is_no_list_of_files(read, tmp_path):
    rows = [{"file_name": {"bytes": b"x", "path": "a.png"}, "text": "x"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "m.parquet")
    with pytest.raises(UserError, match=r"'file_name' holds struct<.*as a dataset"):
        read("m.parquet", (tmp_path / "m.parquet").read_bytes())


def test_a_parquet_file_lacks_a_column(read, tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"file": "a.png"}]), tmp_path / "m.parquet")
    with pytest.raises(UserError, match="has no column file_name and text; it has file"):
        read("m.parquet", (tmp_path / "m.parquet").read_bytes())


def variants(caption, *, count=4, separator=",", keep=0):
    return tag_variants(caption, count=count, separator=separator, keep=keep)


@pytest.mark.parametrize(
    ("caption", "trigger", "expected"),
    [
        ("a cat", "sks", "sks, a cat"),
        ("a SKS cat", "sks", "a SKS cat"),
        ("masks and asks", "sks", "sks, masks and asks"),
        ("sks_cat", "sks", "sks, sks_cat"),
        ("sks", "sks", "sks"),
        ("(sks), a cat", "sks", "(sks), a cat"),
        ("a photo in the style of X", "style of x", "a photo in the style of X"),
        ("50% off", "50%", "50% off"),
        ("axb", "a.b", "a.b, axb"),
        ("Éclair", "éclair", "Éclair"),
        (
            '{"compositional_deconstruction": {}, "high_level_description": "a cat é"}',
            "sks",
            '{"high_level_description":"sks, a cat é","compositional_deconstruction":{}}',
        ),
        (
            '{"compositional_deconstruction": {}}',
            "sks",
            '{"high_level_description":"sks","compositional_deconstruction":{}}',
        ),
        (
            '{"compositional_deconstruction": {"background": "sks"}}',
            "sks",
            '{"compositional_deconstruction": {"background": "sks"}}',
        ),
        (
            '{"compositional_deconstruction": {"a": NaN}}',
            "b",
            'b, {"compositional_deconstruction": {"a": NaN}}',
        ),
        ('{"other": 1}', "sks", 'sks, {"other": 1}'),
        ("{best quality}, a cat", "sks", "sks, {best quality}, a cat"),
    ],
)
def test_a_trigger_is_put_ahead_unless_its_words_are_there(caption, trigger, expected):
    assert with_trigger(caption, trigger) == expected
    assert has_trigger(with_trigger(caption, trigger), trigger)


def test_all_cells_and_all_texts_of_lists_are_captions():
    cells = {"short": " a ", "none": None, "blank": " ", "long": ["b", "c "]}
    assert captions_in(cells) == ("a", "b", "c")


@pytest.mark.parametrize("cells", [{}, {"a": None}, {"a": "", "b": []}])
def test_a_row_without_any_text_is_refused(cells):
    with pytest.raises(UserError, match="no text in"):
        captions_in(cells)


@pytest.mark.parametrize("cell", [5, 1.5, True, {"a": "b"}, ["good", None], ["good", ""], [["nested"]]])
def test_a_cell_that_holds_something_else_is_refused_even_next_to_a_good_one(cell):
    with pytest.raises(UserError, match="no text in 'odd' but"):
        captions_in({"good": "x", "odd": cell})


@pytest.mark.parametrize("text", ["half \ud83d of a pair", "zero \0 byte"])
def test_text_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="not UTF-8 text"):
        clean_caption(text)


def test_a_caption_above_a_mebibyte_is_refused_by_name_and_not_read(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(b"")
    (tmp_path / "a.txt").write_text("x" * MAX_CAPTION_BYTES)
    (tmp_path / "b.txt").write_text("x" * (MAX_CAPTION_BYTES + 1))
    with (tmp_path / "c.txt").open("wb") as file:
        file.truncate(1 << 40)  # A reader would need a tebibyte.
    found = find_records([Source(path=tmp_path)], media_store=tmp_path / "unused", on_bad_item="skip")
    assert [record.name for record in found.records] == ["a.png"]
    least = "too long for a caption: 1,048,577 bytes, and 1,048,576 are the most"
    assert found.unread == {"b.png": f"b.txt: {least}", "c.png": found.unread["c.png"]}
    assert found.unread["c.png"].startswith("c.txt: too long for a caption: 1,099,511,627,776 bytes")


def test_a_cell_above_a_mebibyte_is_refused():
    assert captions_in({"text": "x" * MAX_CAPTION_BYTES})
    with pytest.raises(UserError, match="too long for a caption: 1,048,577 bytes, and 1,048,576 are"):
        captions_in({"text": ["good", "x" * (MAX_CAPTION_BYTES + 1)]})


def test_the_first_variant_is_the_caption_and_the_others_are_orders_of_its_tags():
    caption = "one,two ,  three,four,five"
    first, *others = variants(caption, count=6)
    assert first == caption
    assert len(others) == 5
    for other in others:
        assert sorted(other.split(", ")) == ["five", "four", "one", "three", "two"]


def test_kept_tags_stay_at_the_start():
    for variant in variants("sks, b, c, d, e, f", count=8, keep=2)[1:]:
        assert variant.startswith("sks, b, ")
    assert variants("a, b, c", count=8, keep=3) == ("a, b, c",)
    assert variants("a, b, c", count=8, keep=9) == ("a, b, c",)


def test_variants_depend_only_on_the_caption():
    caption = "a, b, c, d, e, f, g, h"
    assert variants(caption) == variants(caption)
    orders = {tuple(map("abcdefgh".index, text.split(", "))) for text in variants(caption)[1:]}
    letters = dict(zip("abcdefgh", "ijklmnop", strict=True))
    renamed = ", ".join(letters[letter] for letter in caption.split(", "))
    assert orders != {tuple(map("ijklmnop".index, text.split(", "))) for text in variants(renamed)[1:]}


def test_fewer_variants_do_not_change_the_first_ones():
    caption = "a, b, c, d, e, f, g, h"
    assert variants(caption, count=9)[:4] == variants(caption, count=4)
    assert variants(caption, count=1) == (caption,)


def test_all_orders_are_drawn_and_none_twice():
    found = variants("a, b, c", count=200)
    assert sorted(found) == sorted(", ".join(order) for order in itertools.permutations("abc"))
    assert found[0] == "a, b, c"


def test_a_caption_of_one_tag_has_no_variants():
    assert variants("a photograph of a cat") == ("a photograph of a cat",)


def test_the_separator_is_written_as_it_is_given():
    assert "c| b| a" in variants("a | b | c", separator="|", count=200)
    assert "c | b | a" in variants("a|b|c", separator=" | ", count=200)
    assert "c b a" in variants("a b c", separator=" ", count=200)


def test_the_variants_of_a_caption_never_change():
    assert variants("sks, red, round, small", count=5, keep=1) == (
        "sks, red, round, small",
        "sks, round, small, red",
        "sks, round, red, small",
    )


def records_of(*captions: tuple[str, ...], source: int = 0) -> list[Record]:
    return [
        Record(name=str(place), source=source, target=Path("a.png"), captions=texts)
        for place, texts in enumerate(captions)
    ]


def test_a_tag_counts_once_a_record_in_whatever_captions_and_orders_it_is():
    first = records_of(("cat, red,cat", "red , cat", "black"), ("red,, cat",), ("a" * 129 + ",b",))
    other = records_of(("red; a, b",), source=2)
    counted = count_tags([*first, *other], ",")
    assert counted == {
        0: TagCounts(3, {"cat": 2, "red": 2, "b": 1, "black": 1}),
        2: TagCounts(1, {"b": 1, "red; a": 1}),
    }
    assert list(counted[0].by_tag) == ["cat", "red", "b", "black"]
    assert count_tags(other, "; ") == {2: TagCounts(1, {"a, b": 1, "red": 1})}


def test_tags_in_all_are_those_of_every_record_of_several():
    def in_all(*captions: str) -> list[str]:
        return count_tags(records_of(*((text,) for text in captions)), ",")[0].in_all

    assert in_all("ohwx dog, red", "blue, ohwx dog") == ["ohwx dog"]
    assert in_all("red", "blue") == in_all("ohwx dog") == []


def test_of_many_tags_the_most_frequent_are_counted_in_bounded_memory(monkeypatch):
    monkeypatch.setattr("diffsynth_lite.data.captions._MAX_COUNTED", 20)
    records = records_of(*((f"ohwx, {place % 3}, number {place}",) for place in range(300)))
    tags = count_tags(records, ",")[0].by_tag
    assert len(tags) <= 20
    assert list(tags.items())[:4] == [("ohwx", 300), ("0", 100), ("1", 100), ("2", 100)]
    monkeypatch.setattr("diffsynth_lite.data.captions.MAX_TAGS", 2)
    assert count_tags(records, ",") == {0: TagCounts(300, {"ohwx": 300, "0": 100})}
