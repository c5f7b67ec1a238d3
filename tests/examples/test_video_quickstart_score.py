"""The score of motion: exact on perfect clips, low on wrong ones, and unchanged by an empty LoRA."""

import json
import sys

import comparison
import measure_motion
import motions
import pytest
import score_clips
import shapes
import torch
from diffusers import WanPipeline
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image

SCENES = motions.held_out_scenes() + motions.known_scenes()


def scene(direction, shape="circle"):
    return motions.MovingScene("red", shape, direction, "white")


def test_perfect_clips_are_all_right_and_move_as_far_as_they_were_drawn():
    clips = [motions.draw_frames(scene, speed=0.05) for scene in SCENES]
    score = measure_motion.summarise_motion(measure_motion.read_clips(clips, SCENES))
    # Eight steps of 5 % of 64 pixels, times the length of (0.75, 0.75) for half of them.
    wanted = 8 * 0.05 * 64 * (1 + 0.75 * 2**0.5) / 2
    assert score == measure_motion.MotionScore(1.0, 1.0, pytest.approx(wanted, abs=0.3))


@pytest.mark.parametrize(
    ("shown", "named", "cosine"),
    [("left", "right", -1.0), ("up", "right", 0.0), ("right", "diagonally", 2**-0.5)],
)
def test_another_direction_is_wrong_by_its_angle(shown, named, cosine):
    reading = measure_motion.read_clip(motions.draw_frames(scene(shown)), named)
    assert reading.cosine == pytest.approx(cosine, abs=0.02)
    assert (reading.nearest, reading.right) == (shown, False)


def test_a_shape_that_stays_is_still():
    frames = motions.draw_frames(scene("right"), speed=0.004)
    reading = measure_motion.read_clip(frames, "right")
    assert (reading.nearest, reading.right) == ("still", False)


def test_an_empty_clip_is_still():
    reading = measure_motion.read_clip([Image.new("RGB", (64, 64))] * 9, "right")
    assert (reading.motion, reading.cosine, reading.nearest) == ((0.0, 0.0), 0.0, "still")


def test_the_centre_of_a_shape_is_where_it_was_drawn():
    picture = shapes.draw("ring", (255, 0, 0), (0, 0, 0), centre=(0.25, 0.6), radius=0.2)
    assert measure_motion.shape_centre(picture).tolist() == pytest.approx([16, 38.4], abs=0.5)


def test_a_score_is_the_mean_over_clips():
    right, still = scene("right"), scene("left")
    clips = [motions.draw_frames(right, speed=0.05), motions.draw_frames(still, speed=0.0)]
    score = measure_motion.summarise_motion(measure_motion.read_clips(clips, [right, still]))
    assert (score.accuracy, score.cosine) == (0.5, 0.5)
    assert score.pixels == pytest.approx(8 * 0.05 * 64 / 2, abs=0.3)


def test_a_strip_shows_every_second_frame():
    frames = [Image.new("RGB", (64, 64), (place, 0, 0)) for place in range(9)]
    strip = motions.make_strip(frames)
    assert strip.size == (5 * 64, 64)
    assert [strip.getpixel((64 * place, 0))[0] for place in range(5)] == [0, 2, 4, 6, 8]


@pytest.fixture
def score_lora(tmp_path, monkeypatch, capsys, quickstart):
    """Scores, in two steps, a random LoRA whose B is zero or not; gives the record and what was printed."""
    model, data, lora = quickstart / "mini_wan", tmp_path / "data", tmp_path / "lora"
    data.mkdir()
    for place, trained in enumerate(motions.training_scenes()):
        (data / f"{place}.txt").write_text(f"{trained.caption}\n")
    monkeypatch.setattr(comparison, "NUM_STEPS", 2)
    monkeypatch.setattr(motions, "held_out_scenes", lambda: SCENES[:1])
    monkeypatch.setattr(motions, "known_scenes", lambda: SCENES[8:9])

    def run(*, empty):
        torch.manual_seed(0)
        transformer = score_clips.load_pipeline(model).transformer
        transformer.add_adapter(LoraConfig(r=2, target_modules=["to_v", "to_out.0"], init_lora_weights=empty))
        # So much that the shapes of the clips fall apart, and what moves with them.
        layers = {name: 20 * tensor for name, tensor in get_peft_model_state_dict(transformer).items()}
        WanPipeline.save_lora_weights(lora, transformer_lora_layers=layers)
        options = {"--model": model, "--lora": lora, "--data": data, "--output": tmp_path / "score"}
        arguments = [str(part) for pair in options.items() for part in pair]
        monkeypatch.setattr(sys, "argv", ["score_clips.py", *arguments])
        capsys.readouterr()
        score_clips.main()
        return json.loads((tmp_path / "score" / "score.json").read_text()), capsys.readouterr()

    return run


def test_an_empty_lora_scores_the_same_before_and_after_and_another_one_does_not(score_lora, tmp_path):
    record, printed = score_lora(empty=True)
    changed, _ = score_lora(empty=False)
    for group in ("new", "known"):
        assert len(record[group]["prompts"]) == 1
        assert record[group]["before"] == record[group]["after"] == changed[group]["before"]
        assert changed[group]["after"] != changed[group]["before"]
        for entry in record[group]["prompts"]:
            assert entry["before"] == entry["after"]
    assert record["num_unseen_new_prompts"] == 1
    assert "1 of the 1 prompts" in printed.out
    assert printed.err == ""
    with Image.open(tmp_path / "score" / "grid.png") as sheet:
        assert sheet.width > 5 * 64
        assert sheet.height > 2 * 3 * 64
