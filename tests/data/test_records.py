"""Records and the files that belong to their targets, by folders or by rows."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from diffsynth_lite.data.records import ROLES, Companions, Record, Source, is_image, is_video, stem
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media


def record(target, **companions):
    return Record(name="a", source=0, target=Path(target), captions=("x",), **companions)


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        ("image", record("a.PNG")),
        ("image", record("a.png", mask=Path("m.png"))),
        ("video", record("a.MP4")),
        ("edit", record("a.png", inputs=(Path("i.png"),))),
        ("image_to_video", record("a.mp4", first_frame=Path("f.png"))),
        ("image_to_video", record("a.mp4", last_frame=Path("f.png"))),
        ("control", record("a.mp4", control=Path("c.mp4"), mask=Path("m.png"))),
        ("control", record("a.mp4", control=Path("c.mp4"), inpaint_mask=Path("m.png"))),
        ("inpaint", record("a.png", inpaint_mask=Path("m.png"))),
        ("inpaint", record("a.png", random_masks=1)),
    ],
)
def test_the_kind_follows_from_the_files(kind, made):
    assert made.kind == kind


def test_a_record_is_of_the_kind_of_each_of_its_files():
    assert record("a.mp4", control=Path("c.mp4"), random_masks=2).kinds == ("control", "inpaint")
    assert record("a.mp4", first_frame=Path("f.png"), last_frame=Path("l.png")).kinds == ("image_to_video",)


def test_files_are_all_that_is_read():
    inputs = (Path("i.png"), Path("j.png"))
    assert record("a.png", inputs=inputs, mask=Path("m.png")).files == (Path("a.png"), *inputs, Path("m.png"))
    frames = {"first_frame": Path("f.png"), "last_frame": Path("l.png")}
    assert record("a.mp4", **frames).files == (Path("a.mp4"), Path("f.png"), Path("l.png"))


def test_each_role_has_a_field_wherever_its_files_are_named_or_held():
    assert [role.name for role in ROLES] == [field.name for field in dataclasses.fields(Companions)]
    assert {role.name for role in ROLES} <= {field.name for field in dataclasses.fields(Media)}
    settings = {setting for role in ROLES for setting in (role.column, role.folder)}
    paired = {key for key in Source.model_fields if "_dir" in key or "_column" in key}
    assert paired - {"media_column", "caption_columns"} == settings


def test_suffixes_distinguish_images_and_clips():
    assert [is_image(name) for name in ("a.PNG", "b/a.gif", "a.png.txt", "png", "a.heic")] == [True] * 2 + [
        False
    ] * 3
    assert [is_video(name) for name in ("a.MOV", "b/a.webm", "a.mp4.part", "a.gif")] == [True] * 2 + [
        False
    ] * 2


def test_the_stem_of_a_name_keeps_its_folders():
    names = ["a.png", "b.c/a.1.png", "b.c/a", "a"]
    assert [stem(name) for name in names] == ["a", "b.c/a.1", "b.c/a", "a"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def read_pairs(tmp_path, folder):
    """Read a folder after writing empty media of the given names, with a caption for what is a target."""

    def read_folder(*names, **settings):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            if name.startswith("data/"):
                path.with_suffix(".txt").write_text("x")
        return find_records([Source(path=folder, **settings)], media_store=tmp_path / "unused").require_all()

    return read_folder


def test_inputs_have_the_names_of_their_targets(read_pairs, tmp_path):
    names = ["data/a.png", "data/sub/b.c.png", "in/a.jpg", "in/sub/b.c.png", "in/extra.png", "in/a.txt"]
    first, second = read_pairs(
        *names, "two/a.webp", "two/sub/b.c.bmp", input_dirs=[tmp_path / "in", tmp_path / "two"]
    )
    assert first.inputs == (tmp_path / "in/a.jpg", tmp_path / "two/a.webp")
    assert second.inputs == (tmp_path / "in/sub/b.c.png", tmp_path / "two/sub/b.c.bmp")
    assert first.kind == "edit"


def test_frames_and_masks_have_the_names_of_their_clips(read_pairs, tmp_path):
    folders = {
        "first_frame_dir": tmp_path / "f",
        "last_frame_dir": tmp_path / "l",
        "mask_dir": tmp_path / "m",
    }
    [record] = read_pairs("data/a.mp4", "f/a.png", "l/a.jpg", "m/a.png", **folders)
    assert record.files == tuple(tmp_path / name for name in ("data/a.mp4", "f/a.png", "l/a.jpg", "m/a.png"))


def test_layers_have_the_names_of_their_image(read_pairs, tmp_path):
    names = ["data/a.png", "back/a.png", "front/a.webp", "in/a.png"]
    folders = [tmp_path / "back", tmp_path / "front"]
    [record] = read_pairs(*names, layer_dirs=folders)
    assert record.layers == (tmp_path / "back/a.png", tmp_path / "front/a.webp")
    assert record.kind == "layers"
    [edit] = read_pairs(*names, layer_dirs=folders, input_dirs=[tmp_path / "in"])
    assert edit.kinds == ("edit", "layers")  # which no family takes together
    with pytest.raises(UserError, match=r"b\.mp4: is a clip, and only images have layers"):
        read_pairs("data/b.mp4", "back/b.png", layer_dirs=folders[:1])


def test_folders_inside_the_data_folder_hold_no_targets(read_pairs, folder):
    (folder / "masks").mkdir(parents=True)
    (folder / "masks/a.png").write_bytes(b"")
    [record] = read_pairs("data/a.png", mask_dir=folder / "masks")
    assert (record.name, record.mask) == ("a.png", folder / "masks/a.png")


def test_a_folder_whose_name_begins_alike_still_holds_targets(read_pairs, folder):
    (folder / "in").mkdir(parents=True)
    (folder / "in/inner").mkdir()
    (folder / "in/inner/a.png").write_bytes(b"")
    [record] = read_pairs("data/inner/a.png", input_dirs=[folder / "in"])
    assert record.name == "inner/a.png"


def test_files_next_to_metadata_rows_are_found_as_well(read_pairs, folder, tmp_path):
    folder.mkdir()
    (tmp_path / "rows.csv").write_text("file_name,text\na.png,x\n")
    [record] = read_pairs(
        "data/a.png", "in/a.png", input_dirs=[tmp_path / "in"], metadata=tmp_path / "rows.csv"
    )
    assert record.inputs == (tmp_path / "in/a.png",)


def test_all_items_without_their_file_are_named(read_pairs, tmp_path):
    with pytest.raises(UserError) as error:
        read_pairs(
            "data/a.png",
            "data/b.png",
            "data/c.png",
            "in/b.png",
            "in/c.png",
            "in/c.jpg",
            input_dirs=[tmp_path / "in"],
        )
    message = str(error.value)
    assert "2 of 3 items" in message
    assert f"a.png: {tmp_path}/in has no a.* (.png" in message
    assert "c.jpg and c.png; keep one" in message
    assert "b.png" not in message


def test_images_and_clips_mix_only_where_nothing_is_paired(read_pairs, tmp_path):
    names = ["data/a.png", "data/b.mp4", "in/a.png", "in/b.png"]
    assert [record.kind for record in read_pairs(*names)] == ["image", "video"]
    assert [record.kind for record in read_pairs(*names, mask_dir=tmp_path / "in")] == ["image", "video"]
    with pytest.raises(UserError, match=r"1 of 2 .*: b\.mp4: is a clip, and only images have inputs"):
        read_pairs(*names, input_dirs=[tmp_path / "in"])
    with pytest.raises(UserError, match=r"1 of 2 .*: a\.png: is an image, and only clips have first"):
        read_pairs(*names, first_frame_dir=tmp_path / "in")


def test_a_control_is_a_clip_for_a_clip_and_an_image_for_an_image(read_pairs, tmp_path):
    names = ["data/a.png", "data/b.mp4", "in/a.png", "in/a.mp4", "in/b.png", "in/b.mov"]
    image, clip = read_pairs(*names, control_dir=tmp_path / "in")
    assert (image.control, clip.control) == (tmp_path / "in/a.png", tmp_path / "in/b.mov")
    assert (image.kind, clip.kind) == ("control", "control")
    with pytest.raises(UserError, match=r"b\.mp4: .*masks has no b\.\* \(\.mp4, "):
        read_pairs(*names, "masks/a.png", "masks/b.png", control_dir=tmp_path / "masks")


def test_an_inpaint_mask_of_a_clip_is_an_image_or_a_clip(read_pairs, tmp_path):
    names = ["data/a.png", "data/b.mp4", "data/c.mp4", "in/a.png", "in/b.png", "in/c.mp4", "in/a.mp4"]
    records = read_pairs(*names, inpaint_mask_dir=tmp_path / "in")
    assert [record.inpaint_mask.name for record in records] == ["a.png", "b.png", "c.mp4"]
    with pytest.raises(UserError, match=r"b\.mkv and b\.png; keep one"):
        read_pairs(*names, "in/b.mkv", inpaint_mask_dir=tmp_path / "in")


def test_links_out_of_a_folder_of_files_are_refused(read_pairs, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.png").write_bytes(b"")
    (tmp_path / "in/a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(UserError, match=r"a\.png is a link that leaves the folder"):
        read_pairs("data/a.png", input_dirs=[tmp_path / "in"])
    [record] = read_pairs("data/a.png", input_dirs=[tmp_path / "in"], allow_outside=True)
    assert record.inputs == (tmp_path / "in/a.png",)


def test_the_folder_of_the_targets_is_not_that_of_their_inputs(read_pairs, folder):
    with pytest.raises(UserError, match="holds the targets themselves"):
        read_pairs("data/a.png", input_dirs=[folder])


def test_columns_need_a_metadata_file(read_pairs, caplog):
    with pytest.raises(UserError, match="data: no metadata file for before, mask"):
        read_pairs("data/a.png", input_columns=["before"], mask_column="mask")
    read_pairs("data/a.png", caption_columns=["note"])
    assert "data: no metadata file, so nothing is read by caption_columns" in caplog.text


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


def test_inputs_are_in_columns_and_in_lists(read, tmp_path):
    rows = [
        {"file_name": "a.png", "first": "in/1.png", "more": ["in/2.png", "b.png"]},
        {"file_name": "sub/e.png", "first": "in/2.png", "more": ""},
    ]
    first, second = read(*rows, input_columns=["first", "more"])
    folder = tmp_path / "data"
    assert first.inputs == (folder / "in/1.png", folder / "in/2.png", folder / "b.png")
    assert second.inputs == (folder / "in/2.png",)
    assert (first.kind, second.kind) == ("edit", "edit")


def test_frames_and_masks_are_in_columns(read, tmp_path):
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


def test_all_that_is_wrong_with_a_row_is_reported_at_once(read):
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
