import logging

import pytest

from diffsynth_lite.data.records import read_records
from diffsynth_lite.errors import UserError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir(exist_ok=True)
    return path


def read(folder, metadata=None):
    return read_records(folder, metadata=metadata, image_column="file_name", caption_column="text")


def names_and_captions(folder, metadata=None):
    return [(record.name, record.caption) for record in read(folder, metadata)]


def test_captions_stand_beside_the_images_at_any_depth_in_the_order_of_names(folder, write_image):
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
    assert read(folder)[3].image == folder / "deep/er/c.webp"


def test_hidden_files_and_folders_are_not_read(folder, write_image):
    write_image("a.png").with_suffix(".txt").write_text("kept")
    write_image(".hidden.png")
    write_image(".cache/b.png")
    assert names_and_captions(folder) == [("a.png", "kept")]


def test_a_caption_keeps_its_inner_lines_and_loses_its_byte_order_mark(folder, write_image):
    write_image("a.png").with_suffix(".txt").write_bytes("\ufefffirst, é\r\nsecond\n".encode())
    assert names_and_captions(folder) == [("a.png", "first, é\nsecond")]


def test_all_unusable_captions_are_named_at_once(folder, write_image):
    for name in ["empty.png", "good.png", "latin.png", "missing.png", "folder.png"]:
        write_image(name)
    (folder / "good.txt").write_text("good")
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "folder.txt").mkdir()
    with pytest.raises(UserError) as error:
        read(folder)
    message = str(error.value)
    assert "4 of 5 images" in message
    for expected in [
        "empty.txt: empty",
        "latin.txt: not UTF-8",
        "missing.png: no missing.txt",
        "folder.png: no",
    ]:
        assert expected in message
    assert "good" not in message
    assert "\n" not in message


def test_a_long_list_of_problems_ends_in_a_count(folder, write_image):
    for index in range(25):
        write_image(f"{index:02}.png")
    with pytest.raises(UserError, match=r"25 of 25 .*; and 5 more") as error:
        read(folder)
    assert "19.png" in str(error.value)
    assert "20.png" not in str(error.value)


def test_caption_files_without_image_are_warned_of(folder, write_image, caplog):
    write_image("a.png").with_suffix(".txt").write_text("kept")
    (folder / "photo.txt").write_text("belongs to photo.heic")
    with caplog.at_level(logging.WARNING):
        read(folder)
    assert "photo.txt" in caplog.text


def test_a_folder_that_is_missing_or_a_file_is_refused(folder):
    with pytest.raises(UserError, match="nowhere: no such folder"):
        read(folder / "nowhere")
    (folder / "a.txt").write_text("x")
    with pytest.raises(UserError, match="is a file; give the folder"):
        read(folder / "a.txt")


def test_a_folder_without_images_says_what_is_read_and_how_much_was_seen(folder):
    (folder / "a.gif").write_bytes(b"")
    (folder / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"no images among its 2 files; \.png, \.jpg"):
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
    assert "2 of 3 images have no row and are left out: a.png; c.png" in caplog.text


def test_metadata_elsewhere_names_images_relative_to_the_data_folder(folder, write_image, tmp_path):
    write_image("sub/a.png")
    metadata = tmp_path / "captions.JSONL"
    metadata.write_text('{"file_name": "./sub//a.png", "text": "found"}\n')
    assert names_and_captions(folder, metadata) == [("sub/a.png", "found")]


@pytest.mark.parametrize("linked", ["a.png", "a.txt"])
def test_links_that_leave_the_folder_are_refused(folder, write_image, tmp_path, linked):
    write_image("a.png").with_suffix(".txt").write_text("x")
    outside = (folder / linked).rename(tmp_path / linked)
    (folder / linked).symlink_to(outside)
    with pytest.raises(UserError, match=f"links that leave it: {linked}"):
        read(folder)


def test_a_row_cannot_reach_outside_through_a_link(folder, write_image, tmp_path):
    (folder / "a.png").symlink_to(write_image("a.png.png").rename(tmp_path / "secret.png"))
    (folder / "metadata.csv").write_text("file_name,text\na.png,x\n")
    with pytest.raises(UserError, match=r"links that leave it: a\.png"):
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
    assert "1 linked folders are not read: more" in caplog.text
