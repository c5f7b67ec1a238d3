import io
import logging
import socket

import datasets
import pytest
from datasets import Dataset, DatasetDict, Features, Image, List, Value, Video
from PIL import Image as PilImage

from diffsynth_lite.data.images import ImageFacts, check_image
from diffsynth_lite.data.records import Part, Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError


@pytest.fixture(autouse=True)
def _cache_of_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    datasets.disable_progress_bars()


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def save(tmp_path):
    """Save columns as a dataset and return its folder."""

    def save_columns(columns, **features):
        folder = tmp_path / "saved"
        Dataset.from_dict(columns, features=Features(features)).save_to_disk(folder)
        return str(folder)

    return save_columns


@pytest.fixture
def read(store):
    def read_dataset(dataset, **settings):
        settings = {"media_column": "image"} | settings
        return find_records([Source(dataset=dataset, **settings)], media_store=store).require_all()

    return read_dataset


def image(color, kind="PNG"):
    content = io.BytesIO()
    PilImage.new("RGB", (8, 6), color).save(content, kind)
    return {"bytes": content.getvalue(), "path": None}


def stored_files(store):
    return sorted(path for path in store.rglob("*") if path.is_file() and path.suffix != ".json")


def test_images_become_files_named_by_their_content_with_the_suffix_of_their_format(save, read, store):
    kinds = ["PNG", "JPEG", "WEBP", "BMP", "PNG", "TIFF", "GIF", "AVIF"]
    images = [image("red", kind) | {"path": "wrong.txt"} for kind in kinds]
    folder = save({"image": images, "text": list("abcdefgh")}, image=Image(), text=Value("string"))
    records = read(folder)
    suffixes = [".png", ".jpg", ".webp", ".bmp", ".png", ".tiff", ".gif", ".avif"]
    assert [record.target.suffix for record in records] == suffixes
    assert [record.target.read_bytes() for record in records] == [image["bytes"] for image in images]
    assert [record.name for record in records][:5:4] == ["00000000.png", "00000004.png"]
    assert records[0].target == records[4].target
    assert len(stored_files(store)) == 7
    assert check_image(records[2].target) == ImageFacts(width=8, height=6)
    assert [record.captions for record in records] == [(letter,) for letter in "abcdefgh"]


def test_inputs_masks_and_several_captions_come_out_of_columns(save, read):
    columns = {
        "after": [image("red"), image("blue")],
        "before": [[image("green"), image("black")], [image("white")]],
        "mask": [image("gray")] * 2,
        "text": [["one", "two"], ["three"]],
    }
    kinds = {"after": Image(), "before": List(Image()), "mask": Image(), "text": List(Value("string"))}
    settings = {
        "media_column": "after",
        "input_columns": ["before"],
        "mask_column": "mask",
        "trigger": "sks",
    }
    first, second = read(save(columns, **kinds), **settings)
    assert [path.read_bytes() for path in first.inputs] == [each["bytes"] for each in columns["before"][0]]
    assert (first.kind, len(second.inputs), second.mask) == ("edit", 1, first.mask)
    assert first.captions == ("sks, one", "sks, two")


@pytest.mark.parametrize(
    ("start", "suffix"),
    [
        (b"\0\0\0\x20ftypisom", ".mp4"),
        (b"\0\0\0\x14ftypqt  ", ".mov"),
        (b"\0\0\0\x14ftypM4V ", ".m4v"),
        (b"\x1a\x45\xdf\xa3more", ".mkv"),
        (b"RIFF\0\0\0\0AVI ", ".avi"),
    ],
)
def test_clips_are_stored_without_being_decoded(save, read, start, suffix):
    clips = [{"bytes": start, "path": None}]
    folder = save({"video": clips, "text": ["a"]}, video=Video(), text=Value("string"))
    [record] = read(folder, media_column="video")
    assert (record.kind, record.target.suffix) == ("video", suffix)
    assert record.target.read_bytes() == start


def test_an_unchanged_dataset_is_not_read_again(save, read, store, caplog):
    columns = {"image": [image("red"), image("blue")], "text": ["a", "b"]}
    folder = save(columns, image=Image(), text=Value("string"))
    first = read(folder)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="diffsynth_lite"):
        assert read(folder) == first
        assert not caplog.records
        stored_files(store)[0].unlink()
        assert read(folder) == first
    assert "storing the media" in caplog.text
    assert len(stored_files(store)) == 2


def test_another_dataset_in_the_same_place_is_read(save, read):
    columns = {"image": [image("red")], "text": ["a"]}
    [first] = read(save(columns, image=Image(), text=Value("string")))
    [second] = read(save(columns | {"image": [image("blue")]}, image=Image(), text=Value("string")))
    assert second.target.read_bytes() != first.target.read_bytes()


def test_a_file_that_was_cut_short_is_stored_again(save, read, store):
    folder = save({"image": [image("red")], "text": ["a"]}, image=Image(), text=Value("string"))
    [record] = read(folder)
    whole = record.target.read_bytes()
    record.target.write_bytes(whole[:9])
    for note in store.rglob("*.json"):
        note.write_bytes(b"")
    assert read(folder)[0].target.read_bytes() == whole


def test_a_split_is_chosen_by_name(tmp_path, read):
    rows = Dataset.from_dict(
        {"image": [image("red")], "text": ["a"]}, features=Features(image=Image(), text=Value("string"))
    )
    DatasetDict(train=rows, other=rows).save_to_disk(tmp_path / "both")
    assert read(str(tmp_path / "both"), split="other")[0].captions == ("a",)
    with pytest.raises(UserError, match="has no split 'test'; it has train, other"):
        read(str(tmp_path / "both"), split="test")
    rows.save_to_disk(tmp_path / "one")
    assert len(read(str(tmp_path / "one"))) == 1
    with pytest.raises(UserError, match="is saved without splits, so there is no 'other'"):
        read(str(tmp_path / "one"), split="other")


@pytest.fixture
def image_folder(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for color in ["red", "blue"]:
        (folder / f"{color}.png").write_bytes(image(color)["bytes"])
    rows = '{"file_name": "red.png", "text": "a"}\n{"file_name": "blue.png", "text": "b"}\n'
    (folder / "metadata.jsonl").write_text(rows)
    return folder


def test_files_of_a_local_folder_are_used_where_they_are(image_folder, read, store):
    records = read(str(image_folder))
    assert {record.captions[0]: record.target for record in records} == {
        "a": image_folder / "red.png",
        "b": image_folder / "blue.png",
    }
    assert stored_files(store) == []
    with pytest.raises(UserError, match=r"cannot be loaded: Unknown split \"test\""):
        read(str(image_folder), split="test")


def test_a_dataset_names_no_files_elsewhere(image_folder, read, tmp_path):
    (tmp_path / "secret.png").write_bytes(image("green")["bytes"])
    (image_folder / "red.png").unlink()
    (image_folder / "red.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(
        UserError, match=r"1 of 2 .* row \d: '.*red\.png' is outside the dataset; set allow_outside"
    ):
        read(str(image_folder))
    assert len(read(str(image_folder), allow_outside=True)) == 2
    with pytest.raises(UserError, match="is outside the dataset"):
        read(str(image_folder))


def test_all_rows_that_cannot_be_used_are_named_at_once(tmp_path, monkeypatch, read):
    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    images = [
        image("red"),
        {"bytes": b"<html>", "path": "page.png"},
        {"bytes": None, "path": "https://host/a.png"},
        {"bytes": None, "path": "/etc/passwd"},
        None,
        {"bytes": b"", "path": None},
        image("blue"),
    ]
    rows = Dataset.from_dict(
        {"image": images, "text": ["a"] * 6 + [""]}, features=Features(image=Image(), text=Value("string"))
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(UserError, match="dataset 'owner/name': 6 of 7 items") as error:
        read("owner/name")
    for expected in [
        "row 1: begins with b'<html>', as no image",
        "row 2: 'https://host/a.png' is a URL, and none is fetched",
        "row 3: '/etc/passwd' is outside the dataset",
        "row 4: no image or clip",
        "row 5: neither bytes nor a file",
        "row 6: no text in 'text' but ''",
    ]:
        assert expected in str(error.value)


def test_wrong_columns_are_named_with_those_that_are_there(save, read):
    folder = save({"image": [image("red")], "text": ["a"]}, image=Image(), text=Value("string"))
    with pytest.raises(UserError, match="has no column file_name; it has image, text"):
        read(folder, media_column="file_name")
    with pytest.raises(UserError, match=r"the column text holds Value.*, not images or clips"):
        read(folder, media_column="text", caption_columns=["text"])


def test_a_dataset_without_rows_is_refused(monkeypatch, read):
    # Datasets that `datasets` 5.2 saved without rows it cannot load, so this one comes as from the hub.
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Dataset.from_dict({"image": []}))
    with pytest.raises(UserError, match="no rows in the split 'train'"):
        read("owner/name")


@pytest.mark.parametrize("name", ["no/such", "./gone", "a:b", "x/y/z"])
def test_a_dataset_that_cannot_be_loaded_is_named_in_one_line(read, name):
    with pytest.raises(UserError, match=f"dataset '{name}' cannot be loaded: ") as error:
        read(name)
    assert "\n" not in str(error.value)


def test_parts_store_their_own_rows_and_then_all_rows_are_known(save, store, monkeypatch):
    images = [image(color) for color in ("red", "blue", "green", "white", "black")]
    folder = save({"image": images, "text": list("abcde")}, image=Image(), text=Value("string"))
    source = Source(dataset=folder, media_column="image")

    def read_part(index, count):
        return find_records([source], media_store=store, part=Part(index, count)).require_all()

    parts = []
    for index in range(4):  # of five rows one part has none
        before = len(stored_files(store))
        parts.append(read_part(index, 4))
        assert len(stored_files(store)) == before + len(parts[-1])
    assert [] in parts

    def refuse(*_):
        raise AssertionError("the bytes of a row are read again")

    monkeypatch.setattr("diffsynth_lite.data.stored_dataset._MediaStore", refuse)
    assert read_part(1, 4) == parts[1]
    whole = read_part(0, 1)
    assert sorted((record for part in parts for record in part), key=lambda record: record.name) == whole
    assert [record.target.read_bytes() for record in whole] == [image["bytes"] for image in images]
    assert read_part(2, 3)  # of another number of parts, from the note of all
