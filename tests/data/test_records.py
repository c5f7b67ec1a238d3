import dataclasses
from pathlib import Path

import pytest

from diffsynth_lite.data.records import ROLES, Companions, Record, Source, is_image, is_video, stem
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


def test_suffixes_tell_images_from_clips():
    assert [is_image(name) for name in ("a.PNG", "b/a.gif", "a.png.txt", "png", "a.heic")] == [True] * 2 + [
        False
    ] * 3
    assert [is_video(name) for name in ("a.MOV", "b/a.webm", "a.mp4.part", "a.gif")] == [True] * 2 + [
        False
    ] * 2


def test_the_stem_of_a_name_keeps_its_folders():
    names = ["a.png", "b.c/a.1.png", "b.c/a", "a"]
    assert [stem(name) for name in names] == ["a", "b.c/a.1", "b.c/a", "a"]
