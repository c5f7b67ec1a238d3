"""The recipes that come with the package load without a warning, and say what they promise."""

import pkgutil
from pathlib import Path

import pytest
import yaml

from diffsynth_lite.config import load_config

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))
CARDS = sorted((REPOSITORY / "configs" / "cards").glob("*.yaml"))
PIPELINES = REPOSITORY / "diffsynth_lite" / "pipelines"


def test_there_are_recipes():
    assert {path.name for path in RECIPES} >= {
        "anima_lora.yaml",
        "chroma_lora.yaml",
        "cogvideox15_lora.yaml",
        "cogvideox_lora.yaml",
        "ernie_image_lora.yaml",
        "flux2_klein_distilled_lora.yaml",
        "flux2_klein_edit_lora.yaml",
        "flux2_klein_lora.yaml",
        "flux2_lora.yaml",
        "flux_fill_lora.yaml",
        "flux_kontext_lora.yaml",
        "flux_lora.yaml",
        "flux_schnell_lora.yaml",
        "ideogram4_lora.yaml",
        "krea2_lora.yaml",
        "hunyuan_video_15_lora.yaml",
        "hunyuan_video_lora.yaml",
        "ltx2_lora.yaml",
        "ltx_video_0_9_5_lora.yaml",
        "ltx_video_lora.yaml",
        "qwen_image_21_lora.yaml",
        "qwen_image_edit_lora.yaml",
        "qwen_lora.yaml",
        "quickstart.yaml",
        "sana_lora.yaml",
        "sd35_large_lora.yaml",
        "sd35_medium_lora.yaml",
        "sdxl_lora.yaml",
        "sdxl_text_encoders_lora.yaml",
        "video_quickstart.yaml",
        "wan22_i2v_a14b_lora.yaml",
        "wan22_t2v_a14b_lora.yaml",
        "wan22_ti2v_5b_lora.yaml",
        "wan_i2v_14b_lora.yaml",
        "wan_t2v_14b_offload.yaml",
        "wan_vace_lora.yaml",
        "wan_t2v_lora.yaml",
        "z_image_lora.yaml",
        "z_image_turbo_lora.yaml",
    }


def test_every_family_has_a_recipe():
    families = {module.name for module in pkgutil.iter_modules([str(PIPELINES)])} - {"base"}
    assert {load_config(path).config.model.family for path in RECIPES} == families


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_without_a_warning(path):
    loaded = load_config(path)
    assert loaded.warnings == ()
    assert loaded.config.output.dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_a_recipe_for_a_card_is_a_few_settings_on_top_of_another(path):
    loaded = load_config(path.name)
    assert loaded.warnings == ()
    assert loaded.path == path
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert given.pop("extends")
    assert sum(map(len, given.values())) <= 5


def test_the_qwen_recipe_fits_the_real_model():
    config = load_config("qwen_lora.yaml").config
    assert config.model.path == "Qwen/Qwen-Image"
    assert (config.data.resolutions, config.data.given_sizes) == ([1024], [])
    assert (config.model.dtype, config.train.mixed_precision) == ("bfloat16", "bf16")
    assert config.train.use_gradient_checkpointing


@pytest.mark.parametrize(
    ("name", "divisor", "num_frames", "fps"),
    [
        ("wan_t2v_lora.yaml", 16, 81, 16),
        ("wan_t2v_14b_offload.yaml", 16, 81, 16),
        ("wan22_t2v_a14b_lora.yaml", 16, 81, 16),
        ("wan22_ti2v_5b_lora.yaml", 32, 121, 24),
        ("wan_i2v_14b_lora.yaml", 16, 81, 16),
        ("wan22_i2v_a14b_lora.yaml", 16, 81, 16),
    ],
)
def test_the_wan_recipes_fit_the_real_models(name, divisor, num_frames, fps):
    config = load_config(name).config
    assert (config.data.width % divisor, config.data.height % divisor) == (0, 0)
    assert (config.data.frame_counts, config.data.fps) == ([num_frames], fps)
    family = "wan_i2v" if "_i2v_" in name else "wan"
    assert (config.model.family, config.model.dtype) == (family, "bfloat16")
    assert config.train.use_gradient_checkpointing_offload
    # What the comments on memory are counted for.
    assert (config.lora.rank, config.train.micro_batch_size) == (32, 1)


@pytest.mark.parametrize(
    ("name", "shift"), [("wan22_t2v_a14b_lora.yaml", 3), ("wan22_i2v_a14b_lora.yaml", 5)]
)
def test_the_recipes_of_two_experts_train_both(name, shift):
    config = load_config(name).config
    assert config.lora.components is None
    # What the comment on each expert's share of the steps is counted for.
    assert (config.objective.timestep_density, config.objective.shift_value) == ("uniform", shift)


@pytest.mark.parametrize(
    "name", ["wan22_ti2v_5b_lora.yaml", "wan_i2v_14b_lora.yaml", "wan22_i2v_a14b_lora.yaml"]
)
def test_the_recipes_of_first_frames_have_a_picture_for_each_preview(name):
    config = load_config(name).config
    assert config.data.first_frame_dir or config.model.family == "wan_i2v"
    assert len(config.validation.inputs) == len(config.validation.prompts) > 0


@pytest.mark.parametrize("name", ["ltx_video_lora.yaml", "ltx_video_0_9_5_lora.yaml"])
def test_the_ltx_video_recipes_fit_the_real_models(name):
    config = load_config(name).config
    assert (config.data.width % 32, config.data.height % 32) == (0, 0)
    assert config.data.frame_counts == [81]
    assert (config.model.family, config.model.dtype) == ("ltx_video", "bfloat16")
    # What the comment on memory is counted for.
    assert (config.lora.rank, config.train.micro_batch_size) == (16, 1)


def test_the_sana_recipe_fits_the_real_model():
    config = load_config("sana_lora.yaml").config
    assert (config.model.family, config.model.dtype) == ("sana", "bfloat16")
    # What Sana's own pipeline draws with unless it is told otherwise.
    assert (config.validation.num_inference_steps, config.validation.guidance_scale) == (20, 4.5)
    # Gemma 2 overflows in float16.
    assert config.model.text_encoder_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen_image_edit", "qwen_image_edit"),
        ("flux_kontext", "flux_kontext"),
        ("flux2_klein_edit", "flux2"),
    ],
)
def test_the_edit_recipes_have_a_picture_for_each_input_of_data_and_previews(name, family):
    config = load_config(f"{name}_lora.yaml").config
    assert config.model.family == family
    assert len(config.data.input_columns) == 1
    # Buckets of all shapes: a result that is cropped stands elsewhere than its input, which never is.
    assert (config.data.resolutions, config.data.given_sizes, config.data.crop) == ([1024], [], "center")
    assert len(config.validation.inputs) == len(config.validation.prompts)
    assert config.train.micro_batch_size == 1


def test_the_recipe_of_masked_pictures_has_a_picture_and_a_mask_for_each_preview():
    config = load_config("flux_fill_lora.yaml").config
    assert (config.model.family, config.data.random_masks) == ("flux_fill", 4)
    pictures = (config.validation.inputs, config.validation.inpaint_masks)
    assert [len(files) for files in pictures] == [len(config.validation.prompts)] * 2
    # What its pipeline is used with unless it is told otherwise.
    assert config.validation.guidance_scale == 30


@pytest.mark.parametrize("family", ["flux", "chroma"])
def test_the_recipes_of_flux_and_chroma_fit_the_real_models(family):
    config = load_config(f"{family}_lora.yaml").config
    assert (config.model.family, config.model.dtype) == (family, "bfloat16")
    assert (config.data.resolutions, config.data.given_sizes) == ([1024], [])
    assert config.train.use_gradient_checkpointing


@pytest.mark.parametrize(("name", "release"), [("flux2", "dev"), ("flux2_klein", "klein-base-4B")])
def test_the_flux2_recipes_fit_the_real_models(name, release):
    config = load_config(f"{name}_lora.yaml").config
    assert (config.model.family, config.model.path) == ("flux2", f"black-forest-labs/FLUX.2-{release}")
    assert (config.model.dtype, config.train.mixed_precision) == ("bfloat16", "bf16")
    # What the comments on memory and shift are counted for.
    assert (config.data.resolutions, config.data.given_sizes) == ([1024], [])
    assert (config.train.micro_batch_size, config.objective.shift) == (1, "family")


def test_the_z_image_recipe_trains_the_base_model():
    config = load_config("z_image_lora.yaml").config
    assert (config.model.family, config.model.path) == ("z_image", "Tongyi-MAI/Z-Image")
    assert (config.data.resolutions, config.data.given_sizes) == ([1024], [])
    assert (config.model.dtype, config.train.mixed_precision) == ("bfloat16", "bf16")
    assert config.train.use_gradient_checkpointing


@pytest.mark.parametrize(
    ("name", "components"),
    [
        ("sdxl_lora.yaml", None),
        ("sdxl_text_encoders_lora.yaml", ["unet", "text_encoder", "text_encoder_2"]),
    ],
)
def test_the_sdxl_recipes_fit_the_real_model(name, components):
    config = load_config(name).config
    assert config.lora.components == components
    assert (config.model.family, config.model.dtype, config.model.vae_dtype) == (
        "sdxl",
        "bfloat16",
        "float32",
    )
    assert (config.data.resolutions, config.data.given_sizes) == ([1024], [])
    assert (config.objective.loss_weighting, config.objective.shift) == ("min_snr", "family")


@pytest.mark.parametrize("name", ["quickstart.yaml", "video_quickstart.yaml"])
def test_a_quickstart_needs_nothing_but_a_cpu(name):
    config = load_config(name).config
    assert {config.model.dtype, config.model.text_encoder_dtype, config.model.vae_dtype} == {"float32"}
    assert config.train.mixed_precision == "no"
    assert config.train.steps % config.validation.every_steps == 0


def test_the_video_quickstart_offloads_what_its_blocks_are_given():
    assert load_config("video_quickstart.yaml").config.train.use_gradient_checkpointing_offload
