"""The recipes that come with the package load without a warning, and say what they promise."""

from pathlib import Path

import pytest

from diffsynth_lite.config import load_config

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def test_there_are_recipes():
    assert {path.name for path in RECIPES} >= {"qwen_lora.yaml", "quickstart.yaml"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_without_a_warning(path):
    loaded = load_config(path)
    assert loaded.warnings == ()
    assert loaded.config.output.dir == f"runs/{path.stem}"


def test_the_qwen_recipe_fits_the_real_model():
    config = load_config("qwen_lora.yaml").config
    assert config.model.path == "Qwen/Qwen-Image"
    assert (config.data.width % 16, config.data.height % 16) == (0, 0)
    assert (config.model.dtype, config.train.mixed_precision) == ("bfloat16", "bf16")
    assert config.train.use_gradient_checkpointing


def test_the_quickstart_needs_nothing_but_a_cpu():
    config = load_config("quickstart.yaml").config
    assert {config.model.dtype, config.model.text_encoder_dtype, config.model.vae_dtype} == {"float32"}
    assert config.train.mixed_precision == "no"
    assert config.train.steps % config.validation.every_steps == 0
