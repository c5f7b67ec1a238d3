import pytest

from diffsynth_lite.data.records import Source
from diffsynth_lite.data.sources import find_records
from diffsynth_lite.errors import UserError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def read(tmp_path, folder):
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


def test_inputs_have_the_names_of_their_targets(read, tmp_path):
    names = ["data/a.png", "data/sub/b.c.png", "in/a.jpg", "in/sub/b.c.png", "in/extra.png", "in/a.txt"]
    first, second = read(
        *names, "two/a.webp", "two/sub/b.c.bmp", input_dirs=[tmp_path / "in", tmp_path / "two"]
    )
    assert first.inputs == (tmp_path / "in/a.jpg", tmp_path / "two/a.webp")
    assert second.inputs == (tmp_path / "in/sub/b.c.png", tmp_path / "two/sub/b.c.bmp")
    assert first.kind == "edit"


def test_frames_and_masks_have_the_names_of_their_clips(read, tmp_path):
    folders = {
        "first_frame_dir": tmp_path / "f",
        "last_frame_dir": tmp_path / "l",
        "mask_dir": tmp_path / "m",
    }
    [record] = read("data/a.mp4", "f/a.png", "l/a.jpg", "m/a.png", **folders)
    assert record.files == tuple(tmp_path / name for name in ("data/a.mp4", "f/a.png", "l/a.jpg", "m/a.png"))


def test_layers_have_the_names_of_their_image(read, tmp_path):
    names = ["data/a.png", "back/a.png", "front/a.webp", "in/a.png"]
    folders = [tmp_path / "back", tmp_path / "front"]
    [record] = read(*names, layer_dirs=folders)
    assert record.layers == (tmp_path / "back/a.png", tmp_path / "front/a.webp")
    assert record.kind == "layers"
    [edit] = read(*names, layer_dirs=folders, input_dirs=[tmp_path / "in"])
    assert edit.kinds == ("edit", "layers")  # which no family takes together
    with pytest.raises(UserError, match=r"b\.mp4: is a clip, and only images have layers"):
        read("data/b.mp4", "back/b.png", layer_dirs=folders[:1])


def test_folders_inside_the_data_folder_hold_no_targets(read, folder):
    (folder / "masks").mkdir(parents=True)
    (folder / "masks/a.png").write_bytes(b"")
    [record] = read("data/a.png", mask_dir=folder / "masks")
    assert (record.name, record.mask) == ("a.png", folder / "masks/a.png")


def test_a_folder_whose_name_begins_alike_still_holds_targets(read, folder):
    (folder / "in").mkdir(parents=True)
    (folder / "in/inner").mkdir()
    (folder / "in/inner/a.png").write_bytes(b"")
    [record] = read("data/inner/a.png", input_dirs=[folder / "in"])
    assert record.name == "inner/a.png"


def test_files_beside_metadata_rows_are_found_as_well(read, folder, tmp_path):
    folder.mkdir()
    (tmp_path / "rows.csv").write_text("file_name,text\na.png,x\n")
    [record] = read("data/a.png", "in/a.png", input_dirs=[tmp_path / "in"], metadata=tmp_path / "rows.csv")
    assert record.inputs == (tmp_path / "in/a.png",)


def test_all_items_without_their_file_are_named(read, tmp_path):
    with pytest.raises(UserError) as error:
        read(
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


def test_images_and_clips_mix_only_where_nothing_is_paired(read, tmp_path):
    names = ["data/a.png", "data/b.mp4", "in/a.png", "in/b.png"]
    assert [record.kind for record in read(*names)] == ["image", "video"]
    assert [record.kind for record in read(*names, mask_dir=tmp_path / "in")] == ["image", "video"]
    with pytest.raises(UserError, match=r"1 of 2 .*: b\.mp4: is a clip, and only images have inputs"):
        read(*names, input_dirs=[tmp_path / "in"])
    with pytest.raises(UserError, match=r"1 of 2 .*: a\.png: is an image, and only clips have first"):
        read(*names, first_frame_dir=tmp_path / "in")


def test_a_control_is_a_clip_beside_a_clip_and_an_image_beside_a_image(read, tmp_path):
    names = ["data/a.png", "data/b.mp4", "in/a.png", "in/a.mp4", "in/b.png", "in/b.mov"]
    image, clip = read(*names, control_dir=tmp_path / "in")
    assert (image.control, clip.control) == (tmp_path / "in/a.png", tmp_path / "in/b.mov")
    assert (image.kind, clip.kind) == ("control", "control")
    with pytest.raises(UserError, match=r"b\.mp4: .*masks has no b\.\* \(\.mp4, "):
        read(*names, "masks/a.png", "masks/b.png", control_dir=tmp_path / "masks")


def test_an_inpaint_mask_of_a_clip_is_an_image_or_a_clip(read, tmp_path):
    names = ["data/a.png", "data/b.mp4", "data/c.mp4", "in/a.png", "in/b.png", "in/c.mp4", "in/a.mp4"]
    records = read(*names, inpaint_mask_dir=tmp_path / "in")
    assert [record.inpaint_mask.name for record in records] == ["a.png", "b.png", "c.mp4"]
    with pytest.raises(UserError, match=r"b\.mkv and b\.png; keep one"):
        read(*names, "in/b.mkv", inpaint_mask_dir=tmp_path / "in")


def test_links_out_of_a_folder_of_files_are_refused(read, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.png").write_bytes(b"")
    (tmp_path / "in/a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(UserError, match=r"a\.png is a link that leaves the folder"):
        read("data/a.png", input_dirs=[tmp_path / "in"])
    [record] = read("data/a.png", input_dirs=[tmp_path / "in"], allow_outside=True)
    assert record.inputs == (tmp_path / "in/a.png",)


def test_the_folder_of_the_targets_is_not_that_of_their_inputs(read, folder):
    with pytest.raises(UserError, match="holds the targets themselves"):
        read("data/a.png", input_dirs=[folder])


def test_columns_need_a_metadata_file(read, caplog):
    with pytest.raises(UserError, match="data: no metadata file for before, mask"):
        read("data/a.png", input_columns=["before"], mask_column="mask")
    read("data/a.png", caption_columns=["note"])
    assert "data: no metadata file, so nothing is read by caption_columns" in caplog.text
