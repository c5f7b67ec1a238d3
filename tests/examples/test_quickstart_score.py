"""The score: exact on perfect drawings, low on wrong ones, and the same before and after an empty LoRA."""

import ast
import json
import random
import sys

import comparison
import grid
import make_data
import measure
import numpy as np
import pytest
import score
import shapes
import torch
from diffusers import QwenImagePipeline
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image

NEW, KNOWN = shapes.held_out_scenes(), shapes.known_scenes(8)


def draw_all(scenes):
    rng = random.Random(3)
    return [shapes.draw_scene(scene, rng) for scene in scenes]


def test_perfect_drawings_are_all_right_at_distance_zero():
    scenes = [*NEW, *shapes.known_scenes(24)]
    assert measure.summarise(measure.read_pictures(draw_all(scenes), scenes)) == measure.Score(1.0, 0.0)


def test_drawings_in_another_colour_are_wrong_by_the_distance_of_the_colours():
    teal, lime = shapes.Scene("teal", "star", "white"), shapes.Scene("lime", "star", "white")
    reading = measure.read_picture(draw_all([lime])[0], teal.colour)
    wanted = np.linalg.norm(np.array(shapes.COLOURS["teal"]) - np.array(shapes.COLOURS["lime"]))
    assert reading.distance == pytest.approx(wanted, abs=0.05)
    assert (reading.nearest, reading.right) == ("lime", False)


def test_a_score_is_the_mean_over_pictures():
    readings = measure.read_pictures(draw_all([NEW[0], NEW[0]]), [NEW[0], KNOWN[0]])
    assert measure.summarise(readings) == measure.Score(0.5, round(readings[1].distance / 2, 1))


def test_an_empty_picture_gives_the_colour_of_its_ground():
    assert measure.shape_colour(Image.new("RGB", (64, 64), (10, 20, 30))).tolist() == [10, 20, 30]


def test_a_few_odd_pixels_are_not_taken_for_the_shape():
    pixels = np.asarray(draw_all([shapes.Scene("teal", "ring", "black")])[0]).copy()
    pixels[10, 10:14] = 255
    reading = measure.read_picture(Image.fromarray(pixels), "teal")
    assert (reading.distance, reading.right) == (0.0, True)


def test_the_ground_is_what_lies_at_the_edge_even_where_the_shape_is_larger():
    picture = shapes.draw("square", shapes.COLOURS["teal"], shapes.GROUNDS["white"], radius=0.55)
    assert measure.shape_colour(picture).tolist() == list(shapes.COLOURS["teal"])


def test_the_grid_shows_every_picture_under_its_caption():
    red, teal = Image.new("RGB", (64, 64), (255, 0, 0)), Image.new("RGB", (64, 64), (0, 128, 128))
    panel = grid.Panel("heading", ["one", "two"], {"before": [red, teal], "after": [teal, red]})
    sheet = grid.draw_grid([panel, panel])
    colours = sheet.getcolors(maxcolors=1 << 20)
    counts = {colour: count for count, colour in colours}
    assert counts[(255, 0, 0)] == counts[(0, 128, 128)] == 4 * 128 * 128
    assert any(max(colour) < 100 and min(colour) < 60 for colour in counts)


@pytest.mark.parametrize(
    "name",
    [
        "comparison.py",
        "grid.py",
        "make_data.py",
        "measure.py",
        "measure_motion.py",
        "motions.py",
        "score.py",
        "score_clips.py",
        "shapes.py",
    ],
)
def test_scoring_needs_nothing_of_this_package(quickstart, name):
    nodes = ast.walk(ast.parse((quickstart / name).read_text()))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    assert "diffsynth_lite" not in "\n".join(ast.unparse(node) for node in imports)


@pytest.fixture
def score_lora(tmp_path, monkeypatch, capsys, quickstart):
    """Scores, in two steps, a random LoRA whose B is zero or not; gives the record and what was printed."""
    model, data, lora = quickstart / "mini_qwen_image", tmp_path / "data", tmp_path / "lora"
    monkeypatch.setattr(sys, "argv", ["make_data.py", "--output", str(data)])
    make_data.main()

    def run(*, empty):
        transformer = score.load_pipeline(model).transformer
        transformer.add_adapter(LoraConfig(r=2, target_modules=["to_v", "to_out.0"], init_lora_weights=empty))
        layers = get_peft_model_state_dict(transformer)
        QwenImagePipeline.save_lora_weights(lora, transformer_lora_layers=layers)
        monkeypatch.setattr(comparison, "NUM_STEPS", 2)
        options = {"--model": model, "--lora": lora, "--data": data, "--output": tmp_path / "score"}
        monkeypatch.setattr(
            sys, "argv", ["score.py", *(str(part) for pair in options.items() for part in pair)]
        )
        capsys.readouterr()
        score.main()
        return json.loads((tmp_path / "score" / "score.json").read_text()), capsys.readouterr()

    return run


def test_an_empty_lora_scores_the_same_before_and_after_and_another_one_does_not(score_lora, tmp_path):
    record, printed = score_lora(empty=True)
    for group, count in (("new", 16), ("known", 8)):
        assert record[group]["before"] == record[group]["after"]
        assert len(record[group]["prompts"]) == count
        for entry in record[group]["prompts"]:
            assert entry["before"] == entry["after"]
    assert record["num_unseen_new_prompts"] == 16
    assert "16 of the 16 prompts" in printed.out
    assert printed.err == ""
    with Image.open(tmp_path / "score" / "grid.png") as sheet:
        assert sheet.width > 8 * 128
        assert sheet.height > 9 * 128
    torch.manual_seed(0)
    changed, _ = score_lora(empty=False)
    for group in ("new", "known"):
        assert changed[group]["before"] == record[group]["before"]
        assert changed[group]["after"] != record[group]["after"]


def test_the_score_counts_prompts_that_were_trained_on(tmp_path):
    (tmp_path / "one.txt").write_text(f"{NEW[0].caption}\n")
    captions = comparison.training_captions(tmp_path)
    assert sum(scene.caption not in captions for scene in NEW) == 15


@pytest.mark.parametrize("missing", ["model", "lora", "data"])
def test_an_input_that_is_not_there_is_named(tmp_path, monkeypatch, capsys, quickstart, missing):
    (tmp_path / comparison.LORA_FILE).touch()
    (tmp_path / "caption.txt").write_text("a teal circle")
    given = {"model": quickstart / "mini_qwen_image", "lora": tmp_path, "data": tmp_path, "output": tmp_path}
    given[missing] = tmp_path / "nowhere"
    arguments = [part for key, path in given.items() for part in (f"--{key}", str(path))]
    monkeypatch.setattr(sys, "argv", ["score.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        comparison.parse_arguments("")
    assert stopped.value.code == 2
    assert f"--{missing} {tmp_path / 'nowhere'} holds no" in capsys.readouterr().err


def test_the_noise_of_a_prompt_depends_on_its_place_only(quickstart, monkeypatch):
    monkeypatch.setattr(comparison, "NUM_STEPS", 2)
    pipeline = score.load_pipeline(quickstart / "mini_qwen_image")
    torch.manual_seed(0)
    first = score.draw_prompts(pipeline, KNOWN[:2])
    torch.manual_seed(1)
    again = score.draw_prompts(pipeline, KNOWN[:2])
    assert [image.tobytes() for image in again] == [image.tobytes() for image in first]
    same_prompt = score.draw_prompts(pipeline, [KNOWN[0], KNOWN[0]])
    assert same_prompt[0].tobytes() != same_prompt[1].tobytes()
