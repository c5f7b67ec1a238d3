"""The scores: exact on perfect images and clips, low on wrong ones, and unchanged by an empty LoRA."""

import ast
import json
import random
import sys

import comparison
import grid
import make_data
import measure
import measure_motion
import motions
import numpy as np
import pytest
import score
import score_clips
import shapes
import torch
from diffusers import QwenImagePipeline, WanPipeline
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image

NEW, KNOWN = shapes.held_out_scenes(), shapes.known_scenes(8)
MOVING = motions.held_out_scenes() + motions.known_scenes()
OWN = "comparison grid make_data measure measure_motion motions score score_clips shapes"


def draw_all(scenes):
    rng = random.Random(3)
    return [shapes.draw_scene(scene, rng) for scene in scenes]


def moving(direction, *, speed, shape="circle"):
    """The frames of a shape that moves."""
    return motions.draw_frames(motions.MovingScene("red", shape, direction, "white"), speed=speed)


def test_perfect_images_and_clips_are_all_right():
    scenes = [*NEW, *shapes.known_scenes(24)]
    assert measure.summarise(measure.read_images(draw_all(scenes), scenes)) == measure.Score(1.0, 0.0)
    clips = [motions.draw_frames(scene, speed=0.05) for scene in MOVING]
    found = measure_motion.summarise_motion(measure_motion.read_clips(clips, MOVING))
    # Eight steps of 5 % of 64 pixels, times the length of (0.75, 0.75) for half of them.
    wanted = 8 * 0.05 * 64 * (1 + 0.75 * 2**0.5) / 2
    assert found == measure_motion.MotionScore(1.0, 1.0, pytest.approx(wanted, abs=0.3))


def test_another_colour_is_wrong_by_the_distance_of_the_colours():
    lime = shapes.Scene("lime", "star", "white")
    reading = measure.read_image(draw_all([lime])[0], "teal")
    wanted = np.linalg.norm(np.array(shapes.COLOURS["teal"]) - np.array(shapes.COLOURS["lime"]))
    assert reading.distance == pytest.approx(wanted, abs=0.05)
    assert (reading.nearest, reading.right) == ("lime", False)


@pytest.mark.parametrize(
    ("shown", "named", "cosine"),
    [("left", "right", -1.0), ("up", "right", 0.0), ("right", "diagonally", 2**-0.5)],
)
def test_another_direction_is_wrong_by_its_angle(shown, named, cosine):
    scene = motions.MovingScene("red", "circle", shown, "white")
    reading = measure_motion.read_clip(motions.draw_frames(scene), named)
    assert reading.cosine == pytest.approx(cosine, abs=0.02)
    assert (reading.nearest, reading.right) == (shown, False)


def test_a_shape_that_stays_and_an_empty_clip_are_still():
    reading = measure_motion.read_clip(moving("right", speed=0.004), "right")
    assert (reading.nearest, reading.right) == ("still", False)
    reading = measure_motion.read_clip([Image.new("RGB", (64, 64))] * 9, "right")
    assert (reading.motion, reading.cosine, reading.nearest) == ((0.0, 0.0), 0.0, "still")


def test_the_centre_of_a_shape_is_where_it_was_drawn():
    image = shapes.draw("ring", (255, 0, 0), (0, 0, 0), centre=(0.25, 0.6), radius=0.2)
    assert measure_motion.shape_centre(image).tolist() == pytest.approx([16, 38.4], abs=0.5)


def test_a_score_is_the_mean_over_images_or_clips():
    readings = measure.read_images(draw_all([NEW[0], NEW[0]]), [NEW[0], KNOWN[0]])
    assert measure.summarise(readings) == measure.Score(0.5, round(readings[1].distance / 2, 1))
    scenes = [motions.MovingScene("red", "circle", name, "white") for name in ("right", "left")]
    clips = [motions.draw_frames(scenes[0], speed=0.05), motions.draw_frames(scenes[1], speed=0.0)]
    found = measure_motion.summarise_motion(measure_motion.read_clips(clips, scenes))
    assert (found.accuracy, found.cosine) == (0.5, 0.5)
    assert found.pixels == pytest.approx(8 * 0.05 * 64 / 2, abs=0.3)


def test_the_colour_is_read_of_the_shape_and_not_of_a_few_pixels_or_the_ground():
    assert measure.shape_colour(Image.new("RGB", (64, 64), (10, 20, 30))).tolist() == [10, 20, 30]
    pixels = np.asarray(draw_all([shapes.Scene("teal", "ring", "black")])[0]).copy()
    pixels[10, 10:14] = 255
    reading = measure.read_image(Image.fromarray(pixels), "teal")
    assert (reading.distance, reading.right) == (0.0, True)
    large = shapes.draw("square", shapes.COLOURS["teal"], shapes.GROUNDS["white"], radius=0.55)
    assert measure.shape_colour(large).tolist() == list(shapes.COLOURS["teal"])


def test_the_grid_shows_every_image_and_a_strip_every_second_frame():
    red, teal = Image.new("RGB", (64, 64), (255, 0, 0)), Image.new("RGB", (64, 64), (0, 128, 128))
    panel = grid.Panel("heading", ["one", "two"], {"before": [red, teal], "after": [teal, red]})
    colours = grid.draw_grid([panel, panel]).getcolors(maxcolors=1 << 20)
    counts = {colour: count for count, colour in colours}
    assert counts[(255, 0, 0)] == counts[(0, 128, 128)] == 4 * 128 * 128
    assert any(max(colour) < 100 and min(colour) < 60 for colour in counts)
    strip = motions.make_strip([Image.new("RGB", (64, 64), (place, 0, 0)) for place in range(9)])
    assert strip.size == (5 * 64, 64)
    assert [strip.getpixel((64 * place, 0))[0] for place in range(5)] == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("name", OWN.split())
def test_scoring_needs_nothing_of_this_package(quickstart, name):
    nodes = ast.walk(ast.parse((quickstart / f"{name}.py").read_text()))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    assert "diffsynth_lite" not in "\n".join(ast.unparse(node) for node in imports)


@pytest.fixture
def score_lora(tmp_path, monkeypatch, capsys, quickstart):
    """Scores, in two steps, a random LoRA whose B is zero or not; gives the record and what was printed."""
    monkeypatch.setattr(comparison, "NUM_STEPS", 2)
    folders = {name: tmp_path / name for name in ("lora", "data")}

    def run(program, model, pipeline, scale, *, empty):
        torch.manual_seed(0)
        transformer = program.load_pipeline(quickstart / model).transformer
        transformer.add_adapter(LoraConfig(r=2, target_modules=["to_v", "to_out.0"], init_lora_weights=empty))
        layers = {name: scale * tensor for name, tensor in get_peft_model_state_dict(transformer).items()}
        pipeline.save_lora_weights(folders["lora"], transformer_lora_layers=layers)
        options = {"model": quickstart / model, **folders, "output": tmp_path / "score"}
        arguments = [part for key, path in options.items() for part in (f"--{key}", str(path))]
        monkeypatch.setattr(sys, "argv", ["score.py", *arguments])
        capsys.readouterr()
        program.main()
        return json.loads((tmp_path / "score" / "score.json").read_text()), capsys.readouterr()

    return run


def assert_changed_by_the_other(record, changed, counts):
    """An empty LoRA scores as without it, another one does not."""
    for group, count in counts.items():
        assert len(record[group]["prompts"]) == count
        assert record[group]["before"] == record[group]["after"] == changed[group]["before"]
        assert changed[group]["after"] != changed[group]["before"]
        assert all(entry["before"] == entry["after"] for entry in record[group]["prompts"])


def test_images_score_the_same_with_an_empty_lora(score_lora, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--output", str(tmp_path / "data")])
    make_data.main()
    record, printed = score_lora(score, "mini_qwen_image", QwenImagePipeline, 1, empty=True)
    with Image.open(tmp_path / "score" / "grid.png") as sheet:
        assert sheet.width > 8 * 128
        assert sheet.height > 9 * 128
    assert record["num_unseen_new_prompts"] == 16
    assert "16 of the 16 prompts" in printed.out
    assert printed.err == ""
    changed, _ = score_lora(score, "mini_qwen_image", QwenImagePipeline, 1, empty=False)
    assert_changed_by_the_other(record, changed, {"new": 16, "known": 8})


@pytest.mark.nightly
def test_clips_score_the_same_with_an_empty_lora(score_lora, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for place, trained in enumerate(motions.training_scenes()):
        (tmp_path / "data" / f"{place}.txt").write_text(f"{trained.caption}\n")
    monkeypatch.setattr(motions, "held_out_scenes", lambda: MOVING[:1])
    monkeypatch.setattr(motions, "known_scenes", lambda: MOVING[8:9])
    # So much that the shapes of the clips fall apart, and what moves with them.
    record, printed = score_lora(score_clips, "mini_wan", WanPipeline, 20, empty=True)
    with Image.open(tmp_path / "score" / "grid.png") as sheet:
        assert sheet.width > 5 * 64
        assert sheet.height > 2 * 3 * 64
    assert record["num_unseen_new_prompts"] == 1
    assert "1 of the 1 prompts" in printed.out
    assert printed.err == ""
    changed, _ = score_lora(score_clips, "mini_wan", WanPipeline, 20, empty=False)
    assert_changed_by_the_other(record, changed, {"new": 1, "known": 1})


def test_the_score_counts_prompts_that_were_trained_on(tmp_path):
    (tmp_path / "one.txt").write_text(f"{NEW[0].caption}\n")
    captions = comparison.training_captions(tmp_path)
    assert sum(scene.caption not in captions for scene in NEW) == 15


@pytest.mark.parametrize("missing", ["model", "lora", "data"])
def test_an_input_that_is_missing_is_named(tmp_path, monkeypatch, capsys, quickstart, missing):
    (tmp_path / comparison.LORA_FILE).touch()
    (tmp_path / "caption.txt").write_text("a teal circle")
    given = {"model": quickstart / "mini_qwen_image", "lora": tmp_path, "data": tmp_path, "output": tmp_path}
    given[missing] = tmp_path / "nowhere"
    arguments = [part for key, path in given.items() for part in (f"--{key}", str(path))]
    monkeypatch.setattr(sys, "argv", ["score.py", *arguments])
    with pytest.raises(SystemExit, match=r"^2$"):
        comparison.parse_arguments("")
    assert f"--{missing} {tmp_path / 'nowhere'} holds no" in capsys.readouterr().err


def test_the_noise_of_a_prompt_depends_on_its_place_only(quickstart, monkeypatch):
    monkeypatch.setattr(comparison, "NUM_STEPS", 2)
    pipeline = score.load_pipeline(quickstart / "mini_qwen_image")
    torch.manual_seed(0)
    first = score.generate_prompts(pipeline, KNOWN[:2])
    torch.manual_seed(1)
    again = score.generate_prompts(pipeline, KNOWN[:2])
    assert [image.tobytes() for image in again] == [image.tobytes() for image in first]
    same_prompt = score.generate_prompts(pipeline, [KNOWN[0], KNOWN[0]])
    assert same_prompt[0].tobytes() != same_prompt[1].tobytes()
