"""The shipped mini pipelines: complete, small, of real classes, and able to generate what captions name."""

import inspect
import json

import measure
import measure_motion
import motions
import pytest
import score
import score_clips
import shapes
import torch
from diffusers import AutoencoderKLQwenImage
from safetensors import safe_open

PARTS = {
    "mini_qwen_image": {
        "_class_name": "QwenImagePipeline",
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
    },
    "mini_wan": {
        "_class_name": "WanPipeline",
        "scheduler": "UniPCMultistepScheduler",
        "text_encoder": "UMT5EncoderModel",
        "tokenizer": "T5Tokenizer",
        "transformer": "WanTransformer3DModel",
        "vae": "AutoencoderKLWan",
    },
}


@pytest.mark.parametrize(("name", "most_bytes"), [("mini_qwen_image", 11_000_000), ("mini_wan", 7_000_000)])
def test_a_folder_is_a_small_pipeline_of_real_classes_in_bfloat16(quickstart, name, most_bytes):
    index = json.loads((quickstart / name / "model_index.json").read_text())
    parts = {key: value[1] for key, value in index.items() if isinstance(value, list) and value[1]}
    assert {"_class_name": index["_class_name"], **parts} == PARTS[name]
    files = list((quickstart / name).glob("*/*.safetensors"))
    assert len(files) == 3
    for path in files:
        with safe_open(path, framework="pt") as content:
            assert {content.get_slice(key).get_dtype() for key in content.keys()} == {"BF16"}  # noqa: SIM118
    assert sum(path.stat().st_size for path in (quickstart / name).rglob("*") if path.is_file()) < most_bytes


@pytest.fixture(scope="module")
def image_pipeline(quickstart):
    return score.load_pipeline(quickstart / "mini_qwen_image")


@pytest.fixture(scope="module")
def video_pipeline(quickstart):
    return score_clips.load_pipeline(quickstart / "mini_wan")


def test_sizes_and_latent_statistics_are_those_of_the_documentation_and_the_release(image_pipeline):
    assert len(image_pipeline.transformer.transformer_blocks) == 6
    assert image_pipeline.transformer.inner_dim == 128
    assert image_pipeline.vae_scale_factor == 8
    defaults = inspect.signature(AutoencoderKLQwenImage).parameters
    for name in ("z_dim", "latents_mean", "latents_std"):
        assert image_pipeline.vae.config[name] == defaults[name].default


def test_every_word_of_the_captions_is_one_token(image_pipeline, video_pipeline):
    prefix = image_pipeline.prompt_template_encode.split("{}")[0]
    assert len(image_pipeline.tokenizer.encode(prefix)) == image_pipeline.prompt_template_encode_start_idx
    scenes = {
        image_pipeline: [shapes.Scene("magenta", "star", "gray")],
        video_pipeline: motions.training_scenes(),
    }
    for pipeline, of_pipeline in scenes.items():
        for scene in of_pipeline:
            assert len(pipeline.tokenizer.tokenize(scene.caption)) == len(scene.caption.split())


@torch.no_grad()
def test_images_show_known_captions_and_no_new_colours(image_pipeline):
    known = [shapes.Scene("red", "circle", "black"), shapes.Scene("blue", "square", "white")]
    new = shapes.held_out_scenes()[::4]
    images = score.generate_prompts(image_pipeline, known)
    readings = measure.read_images(images, known)
    assert [reading.nearest for reading in readings] == ["red", "blue"]
    assert max(reading.distance for reading in readings) < 25
    grounds = [image.getpixel((2, 2)) for image in images]
    assert max(grounds[0]) < 40
    assert min(grounds[1]) > 215
    unknown = measure.read_images(score.generate_prompts(image_pipeline, new), new)
    assert measure.summarise(unknown).distance > 80


@pytest.mark.nightly
def test_clips_move_known_shapes_as_their_captions_say_and_do_not_know_the_new_word(video_pipeline):
    known, new = motions.known_scenes()[::2], motions.held_out_scenes()[:4]
    clips = score_clips.generate_prompts(video_pipeline, known)
    readings = measure_motion.read_clips(clips, known)
    assert [reading.nearest for reading in readings] == ["right", "left", "down", "up"]
    middles = [clip[motions.NUM_FRAMES // 2] for clip in clips]
    assert all(reading.right for reading in measure.read_images(middles, known))
    unknown = measure_motion.read_clips(score_clips.generate_prompts(video_pipeline, new), new)
    found = measure_motion.summarise_motion(unknown)
    assert found.accuracy <= 0.25
    assert found.pixels < 6
