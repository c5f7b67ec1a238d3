"""The recipes that come with the package load without a warning, and say what they promise."""

import pkgutil
from pathlib import Path

import pytest
import yaml

from diffsynth_lite.config import load_config, recipes_for_card

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "configs").glob("*.yaml"))
CARDS = sorted((REPOSITORY / "configs" / "cards").glob("*.yaml"))
PIPELINES = REPOSITORY / "diffsynth_lite" / "pipelines"


def test_there_are_recipes():
    names = (
        "aura_flow_lora "
        "anima_lora chroma_lora cogvideox15_lora cogvideox_lora ernie_image_lora flux2_klein_distilled_lora "
        "flux2_klein_edit_lora flux2_klein_lora flux2_lora flux3_klein_edit_lora flux3_klein_lora "
        "flux_fill_lora flux_kontext_lora flux_lora flux_schnell_lora hunyuan_video_15_lora "
        "hunyuan_video_i2v_lora hunyuan_video_lora ideogram4_lora kandinsky5_image_lora "
        "kandinsky5_video_lora krea2_edit_lora krea2_lora longcat_image_edit_lora "
        "longcat_image_lora ltx25_lora ltx2_ic_lora ltx2_lora ltx_video_0_9_5_lora ltx_video_lora "
        "lumina2_lora qwen_image_21_lora qwen_image_edit_lora qwen_lora quickstart sana_lora "
        "hidream_lora sd35_large_lora sd35_medium_lora sdxl_lora sdxl_text_encoders_lora "
        "video_quickstart wan22_i2v_a14b_lora wan22_t2v_a14b_lora wan22_ti2v_5b_lora "
        "wan22_animate_14b_lora wan22_vace_fun_a14b_lora wan_i2v_14b_lora wan_t2v_14b_offload wan_t2v_lora "
        "minimax_h3_lora slider wan_vace_lora z_image_lora z_image_turbo_lora"
    )
    assert {path.stem for path in RECIPES} >= set(names.split())


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


@pytest.mark.parametrize(
    ("like", "card_gib", "found"),
    [
        ("qwen_lora", 24, "qwen_24gb qwen_16gb qwen_12gb qwen_8gb"),
        ("sdxl_16gb", 12, "sdxl_lora"),  # which others extend, and is for the smallest card
        ("ltx_video_13b_12gb", 20, "ltx_video_13b_16gb ltx_video_13b_12gb"),  # they extend one that extends
        ("ltx_video_0_9_5_lora", 48, "ltx_video_0_9_5_lora"),  # the larger model is another
        ("z_image_turbo_lora", 80, ""),
    ],
)
def test_the_recipes_of_a_model_for_a_card_are_found_the_largest_first(like, card_gib, found):
    given = {"overrides": ["model.path=mine"]}
    for settings in ({}, given) if like.startswith("ltx") else ({},):
        loaded = load_config(f"{like}.yaml", **settings)
        names = [recipe.path.stem for _, recipe in recipes_for_card(loaded, card_gib, **settings)]
        assert " ".join(names) == found


SQUARES = {"data.resolutions": [1024], "data.given_sizes": []}
BFLOAT16 = {"model.dtype": "bfloat16"}
MIXED = BFLOAT16 | {"train.mixed_precision": "bf16"}
FLUX2 = SQUARES | MIXED | {"model.family": "flux2", "train.micro_batch_size": 1, "objective.shift": "family"}
EXPERTS = {"lora.components": None, "objective.timestep_density": "uniform"}
WAN = BFLOAT16 | {
    "train.use_gradient_checkpointing_offload": True,
    "lora.rank": 32,
    "train.micro_batch_size": 1,
}
LTX = BFLOAT16 | {"model.family": "ltx_video", "data.frame_counts": [81], "lora.rank": 16}
SDXL = (
    SQUARES
    | BFLOAT16
    | {"model.vae_dtype": "float32", "objective.loss_weighting": "min_snr", "objective.shift": "family"}
)
# A result that is cropped no longer fits its input, which never is.
EDITS = SQUARES | {"data.crop": "center", "train.micro_batch_size": 1}
CPU = {f"model.{name}": "float32" for name in ("dtype", "text_encoder_dtype", "vae_dtype")}
# What the models were released for, and what the comments of the recipes count with.
SETTINGS = {
    "qwen_lora": SQUARES | MIXED | {"model.path": "Qwen/Qwen-Image"},
    "wan_t2v_lora": WAN | {"data.frame_counts": [81], "data.fps": 16, "model.family": "wan"},
    "wan_t2v_14b_offload": WAN | {"data.frame_counts": [81], "data.fps": 16, "model.family": "wan"},
    "wan22_t2v_a14b_lora": WAN
    | EXPERTS
    | {"model.family": "wan", "data.frame_counts": [81], "data.fps": 16, "objective.shift_value": 3},
    "wan22_ti2v_5b_lora": WAN | {"data.frame_counts": [121], "data.fps": 24, "model.family": "wan"},
    "wan_i2v_14b_lora": WAN | {"data.frame_counts": [81], "data.fps": 16, "model.family": "wan_i2v"},
    "wan22_i2v_a14b_lora": WAN
    | EXPERTS
    | {"model.family": "wan_i2v", "data.frame_counts": [81], "data.fps": 16, "objective.shift_value": 5},
    "wan22_animate_14b_lora": WAN
    | {"data.frame_counts": [77], "data.fps": 30, "validation.guidance_scale": 1},
    "wan22_vace_fun_a14b_lora": WAN
    | EXPERTS
    | {"model.family": "wan_vace", "model.quantize": "int8", "objective.shift_value": 5},
    "ltx_video_lora": LTX | {"train.micro_batch_size": 1},
    "ltx_video_0_9_5_lora": LTX | {"train.micro_batch_size": 1},
    "minimax_h3_lora": MIXED
    | {
        "data.fps": 24,
        "model.quantize": "nf4",
        "objective.guidance_target": 4,
        "validation.guidance_scale": 1,
    },
    # The steps and guidance are those of Sana's own pipeline; Gemma 2 overflows in float16.
    "sana_lora": BFLOAT16
    | {
        "model.text_encoder_dtype": "bfloat16",
        "validation.num_inference_steps": 20,
        "validation.guidance_scale": 4.5,
    },
    "qwen_image_21_edit_lora": EDITS | {"model.training_adapter": "adapters/qwen_image_21"},
    "qwen_image_edit_lora": EDITS | {"model.family": "qwen_image_edit"},
    "krea2_edit_lora": EDITS | {"model.path": "krea/Krea-2-Raw"},
    "flux_kontext_lora": EDITS | {"model.family": "flux_kontext"},
    "flux2_klein_edit_lora": EDITS | {"model.family": "flux2"},
    "flux3_klein_lora": SQUARES | MIXED | {"model.family": "flux3", "train.micro_batch_size": 1},
    "kandinsky5_image_lora": SQUARES | MIXED | {"model.family": "kandinsky5", "train.micro_batch_size": 1},
    "kandinsky5_video_lora": WAN
    | {"data.frame_counts": [61], "data.fps": 24, "model.family": "kandinsky5_video"},
    "flux3_klein_edit_lora": EDITS | {"model.family": "flux3"},
    "flux_fill_lora": {"data.random_masks": 4, "validation.guidance_scale": 30},
    "flux_lora": SQUARES | BFLOAT16 | {"model.family": "flux"},
    "chroma_lora": SQUARES | BFLOAT16 | {"model.family": "chroma"},
    "hidream_lora": SQUARES | MIXED | {"objective.timestep_density": "uniform", "objective.shift": "family"},
    "flux2_lora": FLUX2 | {"model.path": "black-forest-labs/FLUX.2-dev"},
    "flux2_klein_lora": FLUX2 | {"model.path": "black-forest-labs/FLUX.2-klein-base-4B"},
    "aura_flow_lora": SQUARES | MIXED | {"model.path": "fal/AuraFlow-v0.3"},
    "longcat_image_edit_lora": EDITS | {"model.family": "longcat_image_edit"},
    "longcat_image_lora": SQUARES | MIXED | {"validation.num_inference_steps": 50},
    "lumina2_lora": SQUARES | MIXED | {"objective.shift": "resolution"},
    "z_image_lora": SQUARES | MIXED | {"model.path": "Tongyi-MAI/Z-Image"},
    "sdxl_lora": SDXL | {"lora.components": None},
    "sdxl_text_encoders_lora": SDXL | {"lora.components": ["unet", "text_encoder", "text_encoder_2"]},
    "quickstart": CPU | {"train.mixed_precision": "no"},
    "video_quickstart": CPU
    | {"train.mixed_precision": "no", "train.use_gradient_checkpointing_offload": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_recipe_fits_its_model(name):
    config = load_config(f"{name}.yaml").config
    found = {key: getattr(getattr(config, key.split(".")[0]), key.split(".")[1]) for key in SETTINGS[name]}
    assert found == SETTINGS[name]
    assert config.train.use_gradient_checkpointing
    divisor = 32 if config.model.family == "ltx_video" or "5b" in name else 16
    if "quickstart" not in name:
        assert not any(edge % divisor for size in config.data.given_sizes for edge in size)


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES))
def test_each_preview_has_the_files_that_the_items_have(name):
    """An image to edit or to start from, and a mask where the model fills one."""
    config = load_config(name).config
    data, previews = config.data, config.validation
    if (
        data.input_columns
        or data.first_frame_dir
        or config.model.family in ("wan_i2v", "hunyuan_video_i2v", "flux_fill")
    ):
        assert len(previews.inputs) == len(previews.prompts) > 0
    if data.random_masks:
        assert len(previews.inpaint_masks) == len(previews.prompts)


@pytest.mark.parametrize("name", ["quickstart.yaml", "video_quickstart.yaml"])
def test_a_quickstart_ends_with_a_preview(name):
    config = load_config(name).config
    assert config.train.steps % config.validation.every_steps == 0
