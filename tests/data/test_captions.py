import itertools
from pathlib import Path

import pytest

from diffsynth_lite.data import Record
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
from diffsynth_lite.data.records import Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError


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
def test_a_cell_that_holds_something_else_is_refused_even_beside_a_good_one(cell):
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


def test_variants_depend_on_the_caption_alone():
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


def test_a_tag_counts_once_a_record_in_whatever_captions_and_orders_it_stands():
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
