"""Sources of data become records, or all problems are reported; parts read only their own."""

import json
import logging
import os
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from diffsynth_lite.data.captions import CaptionFiles
from diffsynth_lite.data.records import Part, Source, part_index
from diffsynth_lite.data.sources import FoundRecords, find_records
from diffsynth_lite.errors import UserError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir(exist_ok=True)
    return path


def read(folder, metadata=None, **settings):
    source = Source(path=folder, metadata=metadata, **settings)
    return find_records([source], media_store=folder / "unused").require_all()


def names_and_captions(folder, metadata=None, **settings):
    return [(record.name, *record.captions) for record in read(folder, metadata, **settings)]


def test_captions_are_next_to_the_images_at_any_depth_in_the_order_of_names(folder, write_image):
    for name in ["b.png", "a.JPG", "deep/er/c.webp", "B.bmp", "dotted.name.jpeg"]:
        path = write_image(name)
        path.with_suffix(".txt").write_text(f" the caption of {path.stem}\n")
    assert names_and_captions(folder) == [
        ("B.bmp", "the caption of B"),
        ("a.JPG", "the caption of a"),
        ("b.png", "the caption of b"),
        ("deep/er/c.webp", "the caption of c"),
        ("dotted.name.jpeg", "the caption of dotted.name"),
    ]
    assert read(folder)[3].target == folder / "deep/er/c.webp"


def test_hidden_files_and_folders_are_not_read(folder, write_image):
    write_image("a.png").with_suffix(".txt").write_text("kept")
    write_image(".hidden.png")
    write_image(".cache/b.png")
    assert names_and_captions(folder) == [("a.png", "kept")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be"])
def test_a_caption_keeps_its_inner_lines_and_loses_its_byte_order_mark(folder, write_image, encoding):
    write_image("a.png").with_suffix(".txt").write_bytes("\ufefffirst, é\r\nsecond\n".encode(encoding))
    assert names_and_captions(folder) == [("a.png", "first, é\nsecond")]


def test_all_unusable_captions_are_named_at_once(folder, write_image):
    for name in ["empty", "good", "latin", "missing", "folder", "wide", "marked", "two"]:
        write_image(f"{name}.png")
    (folder / "marked.txt").write_bytes("a cat".encode("utf-16") + b"!")
    (folder / "two.txt").write_text("a cat")
    (folder / "two.caption").write_text("a dog")
    (folder / "good.txt").write_text("good")
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "folder.txt").mkdir()
    (folder / "wide.txt").write_bytes("a cat".encode("utf-16-le"))
    with pytest.raises(UserError) as error:
        read(folder)
    message = str(error.value)
    assert "7 of 8 items" in message
    for expected in [
        "empty.txt: empty",
        "latin.txt: not UTF-8 text; save it as UTF-8",
        "wide.txt: not UTF-8 text; save it as UTF-8",
        "marked.txt: not UTF-8 text; save it as UTF-8",
        "two.caption and two.txt; keep one",
        "missing.png: no caption: write missing.txt",
        "folder.png: no",
    ]:
        assert expected in message
    assert "good" not in message
    assert "\n" not in message


@pytest.mark.parametrize(("text", "last"), [(None, 2), ("", 19)])
def test_a_long_list_of_problems_ends_in_a_count(folder, write_image, text, last):
    for index in range(25):
        path = write_image(f"{index:02}.png")
        if text is not None:
            path.with_suffix(".txt").write_text(text)
    with pytest.raises(UserError, match=rf"25 of 25 .*; and {24 - last} more") as error:
        read(folder)
    assert f"{last:02}.png" in str(error.value)
    assert f"{last + 1:02}.png" not in str(error.value)


def test_caption_files_without_image_or_of_several_are_warned_of(folder, write_image, caplog):
    write_image("a.png").with_suffix(".txt").write_text("kept")
    write_image("a.jpg")
    (folder / "photo.txt").write_text("belongs to photo.heic")
    with caplog.at_level(logging.WARNING):
        read(folder)
    assert "photo.txt" in caplog.text
    assert f"{folder}: share their captions, as their names differ in the ending only" in caplog.text
    assert caplog.text.count(": a.jpg and a.png") == 1


def test_files_that_are_not_read_are_counted_by_kind(folder, write_image, caplog):
    for name in ("a.png", "deep/b.tiff", "c.GIF"):
        write_image(name).with_suffix(".caption").write_text("kept")
    for name in ("notes.md", "list.csv", "d.HEIC", "deep/e.heic", "raw", ".hidden.heic"):
        (folder / name).write_text("x")
    metadata = folder.parent / "rows.csv"
    metadata.write_text("file_name,text\na.png,kept\n")
    with caplog.at_level(logging.INFO):
        assert names_and_captions(folder, metadata) == [("a.png", "kept")]
    message = "skipped files: 2 heic; 1 md; 1 without suffix; save heic as png or jpg to train on them"
    assert f"{folder}: {message}" in caplog.messages
    (folder / "list.csv").unlink()
    assert names_and_captions(folder) == [(name, "kept") for name in ("a.png", "c.GIF", "deep/b.tiff")]


def test_a_folder_that_is_missing_or_a_file_is_refused(folder):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        read(folder / "nowhere")
    (folder / "a.txt").write_text("x")
    with pytest.raises(UserError, match="is a file; give the folder"):
        read(folder / "a.txt")


def test_a_folder_without_images_says_what_is_read_and_how_much_was_seen(folder):
    (folder / "a.heic").write_bytes(b"")
    (folder / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"no images or clips among its 2 files; \.png, \.jpg.*\.mp4"):
        read(folder)


def test_metadata_of_the_folder_is_found(folder, write_image):
    write_image("a.png")
    (folder / "metadata.csv").write_text("file_name,text\na.png,from csv\n")
    assert names_and_captions(folder) == [("a.png", "from csv")]


@pytest.mark.parametrize("other", ["metadata.jsonl", "a.txt"])
def test_two_sources_of_captions_are_refused_unless_one_is_named(folder, write_image, other):
    write_image("a.png")
    (folder / "metadata.csv").write_text("file_name,text\na.png,from csv\n")
    (folder / other).write_text('{"file_name": "a.png", "text": "from elsewhere"}\n')
    with pytest.raises(UserError, match=r"holds metadata.* and .*; name the metadata file"):
        read(folder)
    assert names_and_captions(folder, folder / "metadata.csv") == [("a.png", "from csv")]


def test_images_without_a_row_are_left_out_with_a_warning(folder, write_image, caplog):
    for name in ["a.png", "b.png", "c.png"]:
        write_image(name)
    (folder / "metadata.csv").write_text("file_name,text\nb.png,kept\n")
    with caplog.at_level(logging.WARNING):
        assert names_and_captions(folder) == [("b.png", "kept")]
    assert "2 of 3 files have no row and are left out: a.png; c.png" in caplog.text


def test_metadata_elsewhere_names_images_relative_to_the_data_folder(folder, write_image, tmp_path):
    write_image("sub/a.png")
    metadata = tmp_path / "captions.JSONL"
    metadata.write_text('{"file_name": "./sub//a.png", "text": "found"}\n')
    assert names_and_captions(folder, metadata) == [("sub/a.png", "found")]


@pytest.mark.parametrize(
    ("linked", "text", "place"),
    [
        ("a.png", "a.txt", "."),
        ("a.txt", "a.txt", "."),
        ("a.png", "metadata.csv", "."),
        ("a.png", "a.txt", "data-private"),  # whose name begins as that of the folder does
    ],
)
def test_links_that_leave_the_folder_are_refused(folder, write_image, tmp_path, linked, text, place):
    write_image("a.png")
    (folder / text).write_text("file_name,text\na.png,x\n")
    (tmp_path / place).mkdir(exist_ok=True)
    (folder / linked).symlink_to((folder / linked).rename(tmp_path / place / linked))
    with pytest.raises(UserError, match=rf"{linked}:? is a link that leaves the folder"):
        read(folder)


def test_links_within_the_folder_are_followed_and_linked_folders_warned_of(
    folder, write_image, tmp_path, caplog
):
    write_image("a.png").with_suffix(".txt").write_text("x")
    (folder / "b.png").symlink_to("a.png")
    (folder / "b.txt").symlink_to("a.txt")
    (folder / "more").symlink_to(tmp_path, target_is_directory=True)
    with caplog.at_level(logging.WARNING):
        assert names_and_captions(folder) == [("a.png", "x"), ("b.png", "x")]
    assert "1 linked folders are not read, set allow_outside to read them: more" in caplog.text


def test_links_out_are_followed_where_that_is_allowed(folder, write_image, tmp_path):
    outside = tmp_path / "outside"
    write_image("a.png").with_suffix(".txt").write_text("x")
    (folder / "sub").mkdir()
    (folder / "a.png").rename(folder / "sub/b.png")
    (folder / "a.txt").rename(folder / "sub/b.txt")
    (folder / "sub").rename(outside)
    (folder / "linked").symlink_to(outside, target_is_directory=True)
    (folder / "c.png").symlink_to(outside / "b.png")
    (folder / "c.txt").symlink_to(outside / "b.txt")
    assert names_and_captions(folder, allow_outside=True) == [("c.png", "x"), ("linked/b.png", "x")]


def test_linked_folders_that_lead_back_are_read_once(folder, write_image, tmp_path, caplog):
    write_image("sub/a.png").with_suffix(".txt").write_text("x")
    (folder / "sub/loop").symlink_to(folder, target_is_directory=True)
    (folder / "other").symlink_to(folder / "sub", target_is_directory=True)
    with caplog.at_level(logging.WARNING):
        assert names_and_captions(folder, allow_outside=True) == [("sub/a.png", "x")]
    assert "lead to folders that are read: other; sub/loop" in caplog.text


def test_what_is_no_regular_file_is_refused_and_not_opened(folder, write_image):
    for name in ["gone", "loop", "pipe"]:
        write_image(f"{name}.png").with_suffix(".txt").write_text("x")
        (folder / f"{name}.png").unlink()
    os.mkfifo(folder / "pipe.png")
    (folder / "gone.png").symlink_to("nowhere.png")
    (folder / "loop.png").symlink_to("loop.png")
    reasons = (
        "gone.png: is a link to nothing; loop.png: is a link to nothing; pipe.png: is not a regular file"
    )
    with pytest.raises(UserError, match=re.escape(reasons)):
        read(folder)


def test_a_name_that_is_not_unicode_is_refused(folder):
    (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(b"")
    with pytest.raises(UserError, match="has a name that is not UTF-8") as error:
        read(folder)
    assert r"caf\udce9.png" in str(error.value)


def test_clips_have_captions_next_to_them_as_images_have(folder, write_image):
    write_image("a.png").with_suffix(".txt").write_text("an image")
    for suffix in ["mp4", "MOV", "mkv", "webm", "avi", "m4v"]:
        (folder / f"{suffix}.{suffix}").write_bytes(b"")
        (folder / f"{suffix}.txt").write_text("a clip")
    records = read(folder)
    assert [record.kind for record in records] == ["video"] + ["image"] + ["video"] * 5
    assert records[-1].name == "webm.webm"


def test_further_captions_of_an_item_are_in_numbered_files(folder, write_image):
    for name in ["a.png", "b.png", "b.1.png"]:
        write_image(name)
    for name in ["a.txt", "a.10.txt", "a.2.txt", "b.2.txt", "b.1.txt"]:
        (folder / name).write_text(f"from {name}")
    assert names_and_captions(folder) == [
        ("a.png", "from a.txt", "from a.2.txt", "from a.10.txt"),
        ("b.1.png", "from b.1.txt"),
        ("b.png", "from b.2.txt"),
    ]


def test_the_trigger_is_put_ahead_of_captions_that_lack_it(folder, write_image):
    write_image("a.png").with_suffix(".txt").write_text("a cat")
    write_image("b.png").with_suffix(".txt").write_text("a photo of SKS")
    assert names_and_captions(folder, trigger="sks") == [("a.png", "sks, a cat"), ("b.png", "a photo of SKS")]


def test_only_a_trigger_is_the_caption_where_that_is_asked_for(folder, write_image, caplog):
    write_image("a.png").with_suffix(".txt").write_text("a cat")
    write_image("b.png")
    rows, bare = folder.parent / "rows.jsonl", folder.parent / "bare.csv"
    rows.write_text('{"file_name": "a.png", "text": "a cat"}\n{"file_name": "b.png", "text": ""}\n')
    bare.write_text("file_name\na.png\nb.png\n")
    for metadata in (None, rows):
        for lacking, words in (
            ({"trigger": "sks"}, "=optional: sks is"),
            ({"captions": "optional"}, "=optional data.trigger=WORD: the word is"),
        ):
            with pytest.raises(UserError, match=rf"1 of 2 .*; or set data\.captions{words} then the caption"):
                names_and_captions(folder, metadata, **lacking)
        optional = names_and_captions(folder, metadata, trigger="sks", captions="optional")
        assert optional == [("a.png", "sks, a cat"), ("b.png", "sks")]
    for metadata in (None, rows, bare):
        none = names_and_captions(folder, metadata, trigger="sks", captions="none")
        assert none == [("a.png", "sks"), ("b.png", "sks")]
    assert "belong to no image" not in caplog.text
    (folder / "b.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"b\.txt: not UTF-8"):
        names_and_captions(folder, trigger="sks", captions="optional")


def test_records_of_several_sources_have_names_of_their_own(folder, write_image, tmp_path):
    write_image("a.png").with_suffix(".txt").write_text("x")
    other = tmp_path / "else" / "data"
    other.mkdir(parents=True)
    (other / "a.mp4").write_bytes(b"")
    (other / "a.txt").write_text("y")
    sources = [Source(path=folder), Source(path=other, trigger="sks"), Source(path=folder)]
    records = find_records(sources, media_store=tmp_path).require_all()
    assert [(record.name, record.source, record.captions) for record in records] == [
        ("0/a.png", 0, ("x",)),
        ("1/a.mp4", 1, ("sks, y",)),
        ("2/a.png", 2, ("x",)),
    ]


def test_the_problems_of_all_sources_are_named_at_once(folder, write_image, tmp_path):
    write_image("a.png")
    sources = [Source(path=folder), Source(path=tmp_path / "gone"), Source(path=tmp_path / "away")]
    with pytest.raises(UserError) as error:
        find_records(sources, media_store=tmp_path).require_all()
    lines = str(error.value).split("\n")
    for line, problem in zip(
        lines,
        ["no caption: write a.txt; diffsynth-lite caption ", "no such folder", "no such folder"],
        strict=True,
    ):
        assert f": {problem}" in line


def test_records_with_problems_do_not_hide_the_others_and_added_triggers_are_named(tmp_path):
    rows = [("both.png", "a dog", "one dog"), ("half.png", "a cat", "a dog"), ("none.png", "a cat", "")]
    for name, *_ in rows:
        (tmp_path / name).touch()
    table = [f'{{"file_name": "{name}", "a": "{a}", "b": "{b}"}}' for name, a, b in rows]
    (tmp_path / "metadata.jsonl").write_text(
        "\n".join([*table, '{"file_name": "gone.png", "a": "x", "b": "y"}'])
    )
    source = Source(path=tmp_path, caption_columns=["a", "b"], trigger="dog")
    found = find_records([source], media_store=tmp_path / "unused")
    assert [record.name for record in found.records] == ["both.png", "half.png", "none.png"]
    assert found.without_trigger == ["half.png", "none.png"]
    [problem] = found.problems
    assert "1 of 4 items cannot be used" in problem
    assert "gone.png" in problem
    assert found.unread.keys() == {"row 4"}
    assert find_records([source], media_store=tmp_path, on_bad_item="skip").problems == []


NUM_ITEMS = 24


@pytest.fixture
def captioned_folder(tmp_path: Path) -> Path:
    captioned_folder = tmp_path / "data"
    captioned_folder.mkdir()
    for place in range(NUM_ITEMS):
        Image.new("RGB", (8, 6), (place, 0, 0)).save(captioned_folder / f"{place}.png")
        (captioned_folder / f"{place}.txt").write_text(f"number {place}")
    return captioned_folder


def read_part(source: Source, part: Part, *others: Source) -> FoundRecords:
    return find_records([source, *others], media_store=Path("unused"), part=part)


def test_parts_are_near_equal_and_depend_only_on_names() -> None:
    sizes = Counter(part_index(f"{name}.png", 16) for name in range(10_000))
    assert sorted(sizes) == list(range(16))
    assert max(sizes.values()) < 1.2 * min(sizes.values())
    assert [Part(index, 3).owns("cat.png") for index in range(3)] == [True, False, False]


def test_each_record_of_a_folder_is_in_one_part_and_no_part_reads_captions_of_another(
    captioned_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    captions_of = CaptionFiles.of

    def noting(files: CaptionFiles, target: str) -> tuple[str, ...]:
        opened.append(target)
        return captions_of(files, target)

    monkeypatch.setattr(CaptionFiles, "of", noting)
    source = Source(path=captioned_folder)
    whole = read_part(source, Part(0, 1)).require_all()
    opened.clear()
    parts = [read_part(source, Part(index, 5)).require_all() for index in range(5)]
    assert len(opened) == NUM_ITEMS
    assert sorted((record for part in parts for record in part), key=lambda record: record.name) == whole


@pytest.mark.parametrize("sources", [1, 2])
def test_each_row_of_a_table_is_in_one_part(
    captioned_folder: Path, sources: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"file_name": f"{place}.png", "text": "one"} for place in range(NUM_ITEMS - 1)]
    table = captioned_folder.parent / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [Source(path=captioned_folder, metadata=table)] * sources
    parts = [read_part(given[0], Part(index, 3), *given[1:]) for index in range(3)]
    assert caplog.text == ""  # that a file has no row is known only from all rows
    names = sorted(name for part in parts for name in part.names)
    whole = read_part(given[0], Part(0, 1), *given[1:])
    assert names == sorted(whole.names)
    assert "1 of 24 files have no row" in caplog.text
