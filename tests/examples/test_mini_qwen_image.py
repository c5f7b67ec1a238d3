"""The shipped mini pipeline: complete, small, like the real one where tools look, and able to draw."""

import inspect
import json

import measure
import pytest
import score
import shapes
import torch
from diffusers import AutoencoderKLQwenImage
from safetensors import safe_open


@pytest.fixture(scope="module")
def folder(quickstart):
    return quickstart / "mini_qwen_image"


@pytest.fixture(scope="module")
def pipeline(folder):
    return score.load_pipeline(folder)


def test_the_folder_is_a_qwen_image_pipeline_of_real_classes(folder):
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "QwenImagePipeline"
    parts = {name: value[1] for name, value in index.items() if not name.startswith("_")}
    assert parts == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "transformer": "QwenImageTransformer2DModel",
        "vae": "AutoencoderKLQwenImage",
    }


def test_all_weights_are_stored_in_bfloat16_and_are_small(folder):
    files = list(folder.glob("*/*.safetensors"))
    assert len(files) == 3
    for path in files:
        with safe_open(path, framework="pt") as content:
            assert {content.get_slice(name).get_dtype() for name in content.keys()} == {"BF16"}  # noqa: SIM118
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 11_000_000


def test_the_sizes_are_those_that_the_documentation_names(pipeline):
    assert len(pipeline.transformer.transformer_blocks) == 6
    assert pipeline.transformer.inner_dim == 128
    assert pipeline.vae_scale_factor == 8


def test_the_latent_statistics_are_those_of_the_released_model(pipeline):
    defaults = inspect.signature(AutoencoderKLQwenImage).parameters
    for name in ("z_dim", "latents_mean", "latents_std"):
        assert pipeline.vae.config[name] == defaults[name].default


def test_the_tokenizer_fits_the_template(pipeline):
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    assert len(pipeline.tokenizer.encode(prefix)) == pipeline.prompt_template_encode_start_idx
    caption = shapes.Scene("magenta", "star", "gray").caption
    assert len(pipeline.tokenizer.tokenize(caption)) == len(caption.split())


@torch.no_grad()
def test_it_draws_what_a_known_caption_says(pipeline):
    scenes = [shapes.Scene("red", "circle", "black"), shapes.Scene("blue", "square", "white")]
    images = score.draw_prompts(pipeline, scenes)
    readings = measure.read_pictures(images, scenes)
    assert [reading.nearest for reading in readings] == ["red", "blue"]
    assert max(reading.distance for reading in readings) < 25
    grounds = [image.getpixel((2, 2)) for image in images]
    assert max(grounds[0]) < 40
    assert min(grounds[1]) > 215


@torch.no_grad()
def test_it_does_not_know_the_new_colours(pipeline):
    scenes = shapes.held_out_scenes()[::4]
    summary = measure.summarise(measure.read_pictures(score.draw_prompts(pipeline, scenes), scenes))
    assert summary.distance > 80
