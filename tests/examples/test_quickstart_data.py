"""Images and clips of the quickstarts: true to captions, the same at every call, nothing scored shown."""

import math
import random
import shutil
import subprocess
import sys
from collections import Counter

import make_clips
import make_data
import measure_motion
import motions
import numpy as np
import pytest
import shapes
from PIL import Image

from diffsynth_lite.data.video import clip_times, read_frames

ALL_TRAINING_SCENES = [scene for colour in shapes.NEW_COLOURS for scene in shapes.training_scenes(colour, 12)]
KEPT = {make_data: "teal_circle_on_white.png", make_clips: "red_circle_diagonally_on_white.mp4"}
"""A file that each maker makes."""

both = pytest.mark.parametrize("maker", KEPT, ids=["images", "clips"])


def make(maker, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make", "--output", str(folder)])
        maker.main()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of each maker."""
    folders = {maker: tmp_path_factory.mktemp("made") / "data" for maker in KEPT}
    for maker, folder in folders.items():
        make(maker, folder)
    return folders


def captions_of(folder):
    return {path.stem: path.read_text().strip() for path in folder.glob("*.txt")}


def test_an_image_shows_the_colours_of_its_caption():
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
                # The rest is the smoothed edge.
                assert (in_colour | on_ground).mean() > 0.75


@pytest.mark.parametrize("direction", motions.DIRECTIONS)
def test_a_clip_shows_the_colours_and_the_motion_of_its_caption(direction):
    rng = random.Random(0)
    places = [(c, s, g) for c in shapes.COLOURS for s in motions.SHAPES for g in shapes.GROUNDS]
    for colour, shape, ground in places[::5]:
        frames = motions.draw_clip(motions.MovingScene(colour, shape, direction, ground), rng)
        assert len(frames) == motions.NUM_FRAMES
        for pixels in map(np.asarray, frames):
            assert pixels.shape == (64, 64, 3)
            assert (pixels == shapes.COLOURS[colour]).all(axis=-1).mean() > 0.02
            on_ground = (pixels == shapes.GROUNDS[ground]).all(axis=-1)
            assert on_ground[[0, -1, 0, -1], [0, 0, -1, -1]].all()
        reading = measure_motion.read_clip(frames, direction)
        assert reading.right
        assert reading.cosine > 0.995


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
def test_each_shape_has_the_area_of_its_formula_and_a_pointed_one_points_up(shape, area):
    white, black = (255, 255, 255), (0, 0, 0)
    pixels = np.asarray(shapes.draw(shape, white, black, radius=0.3).convert("L"))
    # Pillow paints the pixels on the edge of a polygon too: 2 % and more at this size.
    assert pixels.mean() / 255 == pytest.approx(area * 0.3**2, rel=0.06)
    if shape in ("triangle", "star"):
        rows, columns = np.nonzero(np.asarray(shapes.draw(shape, white, black).convert("L")) > 128)
        tip = columns[rows == rows.min()]
        assert abs(tip.mean() - 31.5) < 1
        assert len(tip) <= 3


def test_an_outline_surrounds_the_shape():
    pixels = np.asarray(shapes.draw("circle", (255, 0, 0), (0, 0, 0), radius=0.3, outline=(0, 255, 0)))
    assert tuple(pixels[32, 32]) == (255, 0, 0)
    assert pixels[32, 32 + 22].tolist() == pytest.approx([0, 255, 0], abs=2)


def test_no_scored_scene_is_a_training_scene():
    held_out = shapes.held_out_scenes()
    assert (len(set(held_out)), len(set(ALL_TRAINING_SCENES))) == (16, 48)
    assert not set(held_out) & set(ALL_TRAINING_SCENES)
    assert {scene.shape for scene in held_out} == set(shapes.SHAPES)
    assert {scene.ground for scene in held_out} == set(shapes.GROUNDS)
    with pytest.raises(ValueError, match="12 training scenes"):
        shapes.training_scenes("teal", 13)
    known = shapes.known_scenes(16)
    assert [scene.colour for scene in known] == [*shapes.KNOWN_COLOURS] * 2
    assert len(set(known)) == 16

    training, known = motions.training_scenes(), motions.known_scenes()
    scored = motions.held_out_scenes() + known
    assert (len(set(scored)), len(set(training))) == (16, 48)
    assert not set(training) & set(scored)
    counts = dict.fromkeys(motions.KNOWN_DIRECTIONS, 4) | {motions.NEW_WORD: 32}
    assert Counter(scene.direction for scene in training) == counts
    assert {scene.direction for scene in known} == set(motions.KNOWN_DIRECTIONS)
    assert {scene.colour for scene in scored} == set(shapes.KNOWN_COLOURS)
    assert {scene.shape for scene in scored} == set(motions.SHAPES)


def test_the_images_are_those_of_their_captions(made):
    captions = captions_of(made[make_data])
    assert captions.keys() == {path.stem for path in made[make_data].glob("*.png")}
    assert not set(captions.values()) & {scene.caption for scene in shapes.held_out_scenes()}
    for name, caption in captions.items():
        _, colour, shape, _, _, ground, _ = caption.split()
        assert name == f"{colour}_{shape}_on_{ground}"
        with Image.open(made[make_data] / f"{name}.png") as image:
            assert image.getpixel((0, 0)) == shapes.GROUNDS[ground]
            assert (np.asarray(image) == shapes.COLOURS[colour]).all(axis=-1).mean() > 0.03
    colours = Counter(caption.split()[1] for caption in captions.values())
    assert colours == dict.fromkeys(shapes.NEW_COLOURS, 8)


def test_the_clips_are_those_of_their_captions(made):
    captions = captions_of(made[make_clips])
    assert captions.keys() == {path.stem for path in made[make_clips].glob("*.mp4")}
    assert set(captions.values()) == {scene.caption for scene in motions.training_scenes()}
    times = clip_times(0.0, num_frames=motions.NUM_FRAMES, fps=motions.FPS)
    frames = read_frames(made[make_clips] / "cyan_ring_diagonally_on_gray.mp4", times)
    assert len(frames) == motions.NUM_FRAMES
    assert measure_motion.read_clip(frames, motions.NEW_WORD).right


@both
def test_a_second_call_keeps_the_files_and_writes_only_those_that_are_missing(made, maker):
    gone = made[maker] / KEPT[maker]
    content = gone.read_bytes()
    gone.unlink()
    times = {path: path.stat().st_mtime_ns for path in made[maker].iterdir()}
    make(maker, made[maker])
    assert gone.read_bytes() == content
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize(
    ("maker", "name"),
    [(make_data, "holiday.jpg"), (make_data, KEPT[make_data]), (make_clips, "holiday.mp4")],
)
def test_a_folder_with_other_files_is_left_as_it_is(tmp_path, monkeypatch, capsys, maker, name):
    scenes = motions.training_scenes()[:1]
    monkeypatch.setattr(motions, "training_scenes", lambda: scenes)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(SystemExit, match=r"^2$"):
        make(maker, tmp_path)
    assert name in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_an_output_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(SystemExit):
        make(make_data, tmp_path / "data")
    assert "is a file" in capsys.readouterr().err


def test_the_folder_works_where_it_is_copied_to(tmp_path, quickstart, made):
    for script in quickstart.glob("*.py"):
        shutil.copy(script, tmp_path)
    command = [sys.executable, "make_data.py", "--output", "copy"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    copy = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert copy == {path.name: path.read_bytes() for path in made[make_data].iterdir()}
