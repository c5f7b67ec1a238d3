"""The clips of the video quickstart: true to their captions, the same at every call, nothing scored shown."""

import random
import sys

import make_clips
import measure_motion
import motions
import numpy as np
import pytest
import shapes

from diffsynth_lite.data.video import clip_times, read_frames


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips") / "data"
    run_make_clips(folder)
    return folder


def run_make_clips(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_clips.py", "--output", str(folder)])
        make_clips.main()


def all_scenes(direction):
    colours, grounds = shapes.COLOURS, shapes.GROUNDS
    return [motions.MovingScene(c, s, direction, g) for c in colours for s in motions.SHAPES for g in grounds]


@pytest.mark.parametrize("direction", motions.DIRECTIONS)
def test_a_clip_shows_the_colours_and_the_motion_of_its_caption(direction):
    rng = random.Random(0)
    for scene in all_scenes(direction)[::5]:
        frames = motions.draw_clip(scene, rng)
        assert len(frames) == motions.NUM_FRAMES
        for frame in frames:
            pixels = np.asarray(frame)
            assert pixels.shape == (64, 64, 3)
            assert (pixels == shapes.COLOURS[scene.colour]).all(axis=-1).mean() > 0.02
            on_ground = (pixels == shapes.GROUNDS[scene.ground]).all(axis=-1)
            assert on_ground[[0, -1, 0, -1], [0, 0, -1, -1]].all()
        reading = measure_motion.read_clip(frames, direction)
        assert reading.right
        assert reading.cosine > 0.995


def test_no_scored_scene_is_a_training_scene():
    training = motions.training_scenes()
    scored = motions.held_out_scenes() + motions.known_scenes()
    assert len(set(training)) == 48
    assert len(set(scored)) == 16
    assert not set(training) & set(scored)
    directions = [scene.direction for scene in training]
    assert {name: directions.count(name) for name in motions.DIRECTIONS} == dict.fromkeys(
        motions.KNOWN_DIRECTIONS, 4
    ) | {motions.NEW_WORD: 32}
    assert {scene.direction for scene in motions.known_scenes()} == set(motions.KNOWN_DIRECTIONS)
    assert {scene.colour for scene in scored} == set(shapes.KNOWN_COLOURS)
    assert {scene.shape for scene in scored} == set(motions.SHAPES)


def test_the_training_set_has_the_clips_of_its_captions(data):
    captions = {path.stem: path.read_text().strip() for path in data.glob("*.txt")}
    assert captions.keys() == {path.stem for path in data.glob("*.mp4")}
    assert set(captions.values()) == {scene.caption for scene in motions.training_scenes()}


def test_a_clip_keeps_its_motion_as_a_file(data):
    times = clip_times(0.0, num_frames=motions.NUM_FRAMES, fps=motions.FPS)
    frames = read_frames(data / "cyan_ring_diagonally_on_gray.mp4", times)
    assert len(frames) == motions.NUM_FRAMES
    assert measure_motion.read_clip(frames, motions.NEW_WORD).right


def test_a_second_call_keeps_the_files_and_writes_only_what_is_missing(data):
    gone = data / "red_circle_diagonally_on_white.mp4"
    content = gone.read_bytes()
    gone.unlink()
    times = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    run_make_clips(data)
    assert gone.read_bytes() == content
    assert {name: (data / name).stat().st_mtime_ns for name in times} == times


def test_a_folder_with_other_files_is_left_alone(tmp_path, capsys, monkeypatch):
    scenes = motions.training_scenes()[:1]
    monkeypatch.setattr(motions, "training_scenes", lambda: scenes)
    (tmp_path / "holiday.mp4").write_bytes(b"mine")
    with pytest.raises(SystemExit):
        run_make_clips(tmp_path)
    assert "holiday.mp4" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["holiday.mp4"]
