"""The drawings and the training set: true to the captions, the same at every call, nothing held out shown."""

import math
import random
import shutil
import subprocess
import sys

import make_data
import numpy as np
import pytest
import shapes
from PIL import Image

ALL_TRAINING_SCENES = [scene for colour in shapes.NEW_COLOURS for scene in shapes.training_scenes(colour, 12)]


def run_make_data(monkeypatch, folder):
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--output", str(folder)])
    make_data.main()


@pytest.fixture
def data(tmp_path, monkeypatch):
    run_make_data(monkeypatch, tmp_path / "data")
    return tmp_path / "data"


def test_a_drawing_shows_the_colours_of_its_caption():
    rng = random.Random(0)
    for colour in shapes.COLOURS:
        for shape in shapes.SHAPES:
            for ground in shapes.GROUNDS:
                scene = shapes.Scene(colour, shape, ground)
                assert scene.caption == f"a {colour} {shape} on a {ground} background"
                pixels = np.asarray(shapes.draw_scene(scene, rng))
                assert pixels.shape == (64, 64, 3)
                in_colour = (pixels == shapes.COLOURS[colour]).all(axis=-1)
                on_ground = (pixels == shapes.GROUNDS[ground]).all(axis=-1)
                assert in_colour.mean() > 0.03
                assert on_ground[0].all()
                # What is neither is the smoothed edge.
                assert (in_colour | on_ground).mean() > 0.75


@pytest.mark.parametrize(
    ("shape", "area"),
    [
        ("circle", math.pi),
        ("square", 2 * 1.1**2),
        ("triangle", 3**0.5 * 3 / 4 * 1.1**2),
        ("star", 5 * 0.45 * math.sin(math.pi / 5)),
        ("ring", math.pi * 3 / 4),
        ("cross", 4 * 0.76 - 0.76**2),
    ],
)
def test_each_shape_has_the_area_of_its_formula(shape, area):
    assert shape in shapes.SHAPES
    white, black = (255, 255, 255), (0, 0, 0)
    coverage = np.asarray(shapes.draw(shape, white, black, radius=0.3).convert("L")).mean() / 255
    # Pillow paints the pixels on the edge of a polygon too: 2 % and more at this size.
    assert coverage == pytest.approx(area * 0.3**2, rel=0.06)


@pytest.mark.parametrize("shape", ["triangle", "star"])
def test_a_pointed_shape_points_up(shape):
    rows, columns = np.nonzero(np.asarray(shapes.draw(shape, (255,) * 3, (0,) * 3).convert("L")) > 128)
    tip = columns[rows == rows.min()]
    assert abs(tip.mean() - 31.5) < 1
    assert len(tip) <= 3


def test_an_outline_surrounds_the_shape():
    pixels = np.asarray(shapes.draw("circle", (255, 0, 0), (0, 0, 0), radius=0.3, outline=(0, 255, 0)))
    assert tuple(pixels[32, 32]) == (255, 0, 0)
    assert pixels[32, 32 + 22].tolist() == pytest.approx([0, 255, 0], abs=2)


def test_no_held_out_scene_can_be_a_training_scene():
    held_out = shapes.held_out_scenes()
    assert len(set(held_out)) == 16
    assert len(set(ALL_TRAINING_SCENES)) == 48
    assert not set(held_out) & set(ALL_TRAINING_SCENES)
    assert {scene.shape for scene in held_out} == set(shapes.SHAPES)
    assert {scene.ground for scene in held_out} == set(shapes.GROUNDS)


def test_more_training_scenes_than_there_are_is_refused():
    with pytest.raises(ValueError, match="12 training scenes"):
        shapes.training_scenes("teal", 13)


def test_known_scenes_take_turns():
    scenes = shapes.known_scenes(16)
    assert [scene.colour for scene in scenes] == [*shapes.KNOWN_COLOURS] * 2
    assert len(set(scenes)) == 16


def test_the_training_set_has_eight_pictures_a_colour_with_their_captions(data):
    captions = {path.stem: path.read_text() for path in data.glob("*.txt")}
    assert captions.keys() == {path.stem for path in data.glob("*.png")}
    assert len(captions) == 32
    for name, caption in captions.items():
        _, colour, shape, _, _, ground, _ = caption.split()
        assert name == f"{colour}_{shape}_on_{ground}"
        with Image.open(data / f"{name}.png") as image:
            assert image.getpixel((0, 0)) == shapes.GROUNDS[ground]
            in_colour = (np.asarray(image) == shapes.COLOURS[colour]).all(axis=-1)
        assert in_colour.mean() > 0.03
    colours = [caption.split()[1] for caption in captions.values()]
    assert {colour: colours.count(colour) for colour in colours} == dict.fromkeys(shapes.NEW_COLOURS, 8)


def test_the_training_set_holds_no_held_out_caption(data):
    captions = {path.read_text().strip() for path in data.glob("*.txt")}
    assert not captions & {scene.caption for scene in shapes.held_out_scenes()}


def test_a_second_call_keeps_the_files_and_writes_only_what_is_missing(data, monkeypatch):
    gone = data / "teal_circle_on_white.png"
    content = gone.read_bytes()
    gone.unlink()
    times = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    run_make_data(monkeypatch, data)
    assert gone.read_bytes() == content
    assert {name: (data / name).stat().st_mtime_ns for name in times} == times


@pytest.mark.parametrize("name", ["holiday.jpg", "teal_circle_on_white.png"])
def test_a_folder_with_other_files_is_left_alone(tmp_path, monkeypatch, capsys, name):
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(SystemExit) as stopped:
        run_make_data(monkeypatch, tmp_path)
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_output_that_is_a_file_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(SystemExit):
        run_make_data(monkeypatch, tmp_path / "data")
    assert "is a file" in capsys.readouterr().err


def test_the_folder_works_where_it_is_copied_to(tmp_path, quickstart, data):
    for script in quickstart.glob("*.py"):
        shutil.copy(script, tmp_path)
    command = [sys.executable, "make_data.py", "--output", "copy"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    copy = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert copy == {path.name: path.read_bytes() for path in data.iterdir()}
