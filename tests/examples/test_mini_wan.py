"""The shipped mini video pipeline: complete, small, and able to move the shapes that its captions name."""

import json

import measure
import measure_motion
import motions
import pytest
import score_clips
from safetensors import safe_open


@pytest.fixture(scope="module")
def folder(quickstart):
    return quickstart / "mini_wan"


@pytest.fixture(scope="module")
def pipeline(folder):
    return score_clips.load_pipeline(folder)


def test_the_folder_is_a_wan_pipeline_of_real_classes(folder):
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    parts = {name: value[1] for name, value in index.items() if isinstance(value, list) and value[1]}
    assert parts == {
        "scheduler": "UniPCMultistepScheduler",
        "text_encoder": "UMT5EncoderModel",
        "tokenizer": "T5Tokenizer",
        "transformer": "WanTransformer3DModel",
        "vae": "AutoencoderKLWan",
    }


def test_all_weights_are_stored_in_bfloat16_and_are_small(folder):
    files = list(folder.glob("*/*.safetensors"))
    assert len(files) == 3
    for path in files:
        with safe_open(path, framework="pt") as content:
            assert {content.get_slice(name).get_dtype() for name in content.keys()} == {"BF16"}  # noqa: SIM118
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 7_000_000


def test_every_word_of_the_captions_is_one_token(pipeline):
    for scene in motions.training_scenes():
        assert len(pipeline.tokenizer.tokenize(scene.caption)) == len(scene.caption.split())


def test_it_moves_known_shapes_as_the_caption_says(pipeline):
    scenes = motions.known_scenes()[::2]
    clips = score_clips.draw_prompts(pipeline, scenes)
    readings = measure_motion.read_clips(clips, scenes)
    assert [reading.nearest for reading in readings] == ["right", "left", "down", "up"]
    middles = [clip[motions.NUM_FRAMES // 2] for clip in clips]
    assert all(reading.right for reading in measure.read_pictures(middles, scenes))


def test_it_does_not_know_the_new_word(pipeline):
    scenes = motions.held_out_scenes()[:4]
    score = measure_motion.summarise_motion(
        measure_motion.read_clips(score_clips.draw_prompts(pipeline, scenes), scenes)
    )
    assert score.accuracy <= 0.25
    assert score.pixels < 6
