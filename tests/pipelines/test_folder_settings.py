"""What families read in the settings of their folders: tables of settings, and of what comes of them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from family_sample import Sample

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder
from diffsynth_lite.pipelines.base.diffusers_components import matches_flows

INDEX = "model_index.json"
SCHEDULER = "scheduler/scheduler_config.json"
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "anima",
        "text_conditioner/config.json",
        {"min_sequence_length": 256},
        "pads prompts of up to 512 tokens to 256 ",
    ),
    (
        "hunyuan_video_15",
        "transformer/config.json",
        {"use_meanflow": True},
        "transformer has use_meanflow: a step-distilled model",
    ),
    (
        "hunyuan_video_i2v",
        "transformer/config.json",
        {"image_condition_type": None},
        "transformer has image_condition_type None, and this family trains token_replace and latent_concat",
    ),
    (
        "ltx_video of conditions",
        SCHEDULER,
        {"use_dynamic_shifting": True},
        "scheduler has use_dynamic_shifting, .* set it to false there",
    ),
    (
        "qwen_image_layered",
        "vae/config.json",
        {"input_channels": 3},
        r"vae.*takes \w+ of 3 channels, and that of Qwen-Image-Layered takes 4",
    ),
    (
        "sdxl",
        SCHEDULER,
        {"_class_name": "EDMEulerScheduler"},
        "EDMEulerScheduler.* sampler of denoising diffusion",
    ),
    ("wan", SCHEDULER, {"_class_name": "NoSuchScheduler"}, "names no scheduler class: NoSuchScheduler"),
    ("wan", SCHEDULER, {"_class_name": "WanPipeline"}, "names no scheduler class: WanPipeline"),
    ("wan", SCHEDULER, {"_class_name": None}, "names no scheduler class: None"),
    (
        "wan_i2v",
        INDEX,
        {"expand_timesteps": True},
        "TI2V-5B .* model.family: wan trains, .* _class_name: WanPipeline",
    ),
    (
        "z_image",
        "transformer/config.json",
        {"siglip_feat_dim": 8},
        "holds a Z-Image Omni.*siglip_feat_dim.*use Z-Image or Z-Image-Turbo",
    ),
]
"""Families, a file with changed settings, and the words of the error."""


def family_with(sample: Sample, folder: Path, changed: str, settings: dict[str, Any]) -> ModelFamily:
    """The family on a copy of its folder without weights."""
    for file in sample.family.folder.path.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            copy = folder / file.relative_to(sample.family.folder.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    # Of another class nothing is left of the settings of the first.
    given = {} if "_class_name" in settings else json.loads((folder / changed).read_text())
    (folder / changed).write_text(json.dumps(given | settings))
    return type(sample.family)(PipelineFolder(path=folder))


@pytest.mark.parametrize(("name", "file", "settings", "words"), REFUSED)
def test_settings_of_models_that_are_not_trained_are_refused(
    sample_of: Callable[[str], Sample],
    name: str,
    file: str,
    settings: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    sample_of(name).family.check_folder()
    with pytest.raises(UserError, match=words):
        family_with(sample_of(name), tmp_path, file, settings).check_folder(with_weights=False)


FIXED = {"use_dynamic_shifting": False}
UNIPC = {
    "_class_name": "UniPCMultistepScheduler",
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
}
DPM = UNIPC | {"_class_name": "DPMSolverMultistepScheduler"}
FLOW_MATCH = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
LCM = {"_class_name": "LCMScheduler", "timestep_spacing": "leading"}
ANCESTRAL = {"_class_name": "EulerAncestralDiscreteScheduler", "timestep_spacing": "trailing"}
EULER = {"_class_name": "EulerDiscreteScheduler"}
SHIFTS: list[tuple[str, dict[str, Any], float]] = [
    ("chroma", FLOW_MATCH | {"shift": 3.0}, 3.0),
    ("flux schnell", {}, 1.0),
    # Of HunyuanVideo 1.5 that of its own trainer, but not above that of the folder.
    ("hunyuan_video_15", {"shift": 9.0}, 3.0),
    ("hunyuan_video_15", {"shift": 2.0}, 2.0),
    ("ltx2", FIXED | {"shift": 3.0}, 3.0),
    ("ltx_video", FIXED | {"shift": 3.0}, 3.0),
    # The end of the line that is that of the class, where the folder gives none.
    ("ltx_video", FLOW_MATCH | {"use_dynamic_shifting": True}, pytest.approx(math.exp(1.15))),
    ("ltx_video of conditions", {}, 1.0),
    ("sana", DPM | {"flow_shift": 6.0}, 6.0),
    ("sana", FLOW_MATCH | {"shift": 3.0}, 3.0),
    ("wan", UNIPC | {"flow_shift": 5.0}, 5.0),
    ("wan", FLOW_MATCH | {"shift": 8.0}, 8.0),
    ("wan_i2v", {"flow_shift": 16.0}, 16.0),
    ("wan_i2v a14b", {"flow_shift": 12.0}, 12.0),
    # At most 5 where a clip leads to a last frame.
    ("wan_i2v flf2v", {"flow_shift": 16.0}, 5.0),
    ("wan_i2v flf2v", {"flow_shift": 3.0}, 3.0),
    ("z_image", {"shift": 6.0}, 6.0),
    ("z_image", {"shift": 3.0}, 3.0),
]


@pytest.mark.parametrize(("name", "settings", "shift"), SHIFTS)
def test_the_shift_of_training_is_that_of_the_folders_sampler_at_any_size(
    sample_of: Callable[[str], Sample], name: str, settings: dict[str, Any], shift: float, tmp_path: Path
) -> None:
    family = family_with(sample_of(name), tmp_path, SCHEDULER, settings)
    for width, height in ((512, 512), (1280, 768)):
        shape = family.latents_shape(width, height, family.default_num_frames)
        assert family.family_shift(shape) == shift
    assert type(family.load_scheduler()).__name__ == settings.get(
        "_class_name", type(sample_of(name).family.load_scheduler()).__name__
    )
    if "flow_shift" in settings and name.startswith("wan_i2v"):
        assert family.earlier_shift(shape) == settings["flow_shift"]


DISTILLED: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("flux", "transformer/config.json", {"guidance_embeds": False}, None),
    (
        "flux2 klein",
        INDEX,
        {"is_distilled": True},
        "is_distilled in its model_index.json; better train its base",
    ),
    ("hunyuan_video_15", "guider/guider_config.json", {"guidance_scale": 1.0}, "its guider has a scale of 1"),
    ("krea2", INDEX, {"is_distilled": True}, "is_distilled in its model_index.json; better train Krea 2 Raw"),
    ("ltx2", SCHEDULER, {"use_dynamic_shifting": False}, "use_dynamic_shifting is off in its scheduler; "),
    ("qwen_image_21", INDEX, {"sample_sigmas": [1.0, 0.5]}, "sample_sigmas in its model_index.json; better"),
    ("sdxl", SCHEDULER, LCM, "its sampler, LCMScheduler with timestep_spacing leading, is one for few steps"),
    ("sdxl", SCHEDULER, ANCESTRAL, "timestep_spacing trailing, is one"),
    ("sdxl", SCHEDULER, EULER | {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}, None),
    ("sdxl", SCHEDULER, EULER | {"timestep_spacing": "leading"}, None),
    (
        "z_image",
        SCHEDULER,
        {"shift": 3.0},
        "a shift of 3, as Z-Image-Turbo's (the base model's is 6); better",
    ),
]
"""Families, a file with changed settings, and the words of why it is one; None where it is none."""


@pytest.mark.parametrize(("name", "file", "settings", "words"), DISTILLED)
def test_a_distilled_model_is_known_by_its_settings(
    sample_of: Callable[[str], Sample],
    name: str,
    file: str,
    settings: dict[str, Any],
    words: str | None,
    tmp_path: Path,
) -> None:
    assert sample_of(name).family.distilled is None
    family = family_with(sample_of(name), tmp_path, file, settings)
    family.check_folder(with_weights=False)
    assert family.distilled is None if words is None else words in str(family.distilled)


def test_flux_schnell_is_known_by_its_sampler_and_its_model(sample_of: Callable[[str], Sample]) -> None:
    of_schnell, dev = (sample_of(name).family for name in ("flux schnell", "flux"))
    assert "FLUX.1 schnell; better train FLUX.1 dev" in str(of_schnell.distilled)
    assert (of_schnell.max_prompt_tokens, dev.max_prompt_tokens) == (256, 512)


SHARED_ENCODINGS = [
    ("flux", "flux_fill", True, False),
    ("flux", "flux_kontext", True, False),
    ("flux2", "flux2 klein", False, True),
    # Of 128 tokens, and of one in which the padding is seen; with another autoencoder.
    ("ltx_video", "ltx_video of conditions", False, False),
    ("qwen_image_edit", "qwen_image_edit plus", False, False),
    ("wan_i2v", "wan_i2v a14b", True, False),
    ("wan_i2v", "wan_i2v flf2v", True, False),
    ("wan_i2v a14b", "wan_i2v flf2v", True, False),
]
"""Two models each, and whether what is kept of prompts and of media is the same of both."""


@pytest.mark.parametrize(("first", "second", "of_prompts", "of_media"), SHARED_ENCODINGS)
def test_models_share_what_is_kept_where_their_encoders_make_the_same(
    sample_of: Callable[[str], Sample], first: str, second: str, of_prompts: bool, of_media: bool
) -> None:
    ours, theirs = (sample_of(name).family for name in (first, second))
    dtype = torch.float32
    assert (ours.prompt_encoder_id(dtype) == theirs.prompt_encoder_id(dtype)) == of_prompts
    assert (ours.media_encoder_id(dtype) == theirs.media_encoder_id(dtype)) == of_media


LINES: list[tuple[str, tuple[int, int, float, float]]] = [
    ("flux", (256, 4096, 0.5, 1.15)),
    ("krea2", (256, 6400, 0.5, 1.15)),
    ("qwen_image", (256, 8192, 0.5, 0.9)),
    ("qwen_image_21", (256, 8192, 0.5, 0.9)),
]
"""Tokens of which the line has its ends, and the logarithms of the shift there."""


@pytest.mark.parametrize(("name", "line"), LINES)
def test_the_shift_grows_with_the_image_along_the_line_of_the_pipeline(
    sample_of: Callable[[str], Sample], name: str, line: tuple[int, int, float, float]
) -> None:
    family = sample_of(name).family
    for width, height in ((256, 256), (512, 512), (1024, 1024), (1664, 928), (2048, 2048)):
        shape = family.latents_shape(width, height, 1)
        num_tokens = (width // 16) * (height // 16)
        assert family.num_tokens(shape) == num_tokens
        assert family.family_shift(shape) == pytest.approx(math.exp(calculate_shift(num_tokens, *line)))


FLOWS = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


@pytest.mark.parametrize(
    ("scheduler_class", "settings", "expected"),
    [
        (FlowMatchEulerDiscreteScheduler, {}, True),
        (UniPCMultistepScheduler, FLOWS, True),
        (DPMSolverMultistepScheduler, FLOWS, True),
        (UniPCMultistepScheduler, {}, False),
        (EulerDiscreteScheduler, {}, False),
        (EulerDiscreteScheduler, {"prediction_type": "v_prediction"}, False),
    ],
)
def test_a_sampler_matches_flows_where_its_class_does_or_is_set_to(
    scheduler_class: Any, settings: dict[str, Any], expected: bool
) -> None:
    assert matches_flows(scheduler_class.from_config(settings)) is expected


def test_a_setting_that_the_class_does_not_take_has_no_effect() -> None:
    left_from_another = EulerDiscreteScheduler().config | {"prediction_type": "epsilon"}
    assert matches_flows(FlowMatchEulerDiscreteScheduler.from_config(left_from_another))
