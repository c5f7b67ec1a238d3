"""Settings in the folders of families: what is refused, which samplers are taken, and the shift of these."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers import (
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)
from family_sample import Sample

from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, PipelineFolder
from diffsynth_lite.pipelines.base.samplers import matches_flows

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
        "ltx2",
        "transformer/config.json",
        {"use_keyframes_abs_pos_embedding": True},
        r"transformer has use_keyframes_abs_pos_embedding: an LTX-2\.5",
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
        "model_index.json",
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
SHIFTS: list[tuple[str, dict[str, Any], float]] = [
    ("chroma", FLOW_MATCH | {"shift": 3.0}, 3.0),
    ("flux schnell", {}, 1.0),
    # Of HunyuanVideo 1.5 that of its own trainer, but not above that of the folder.
    ("hunyuan_video_15", {"shift": 9.0}, 3.0),
    ("hunyuan_video_15", {"shift": 2.0}, 2.0),
    ("ltx2", FIXED | {"shift": 3.0}, 3.0),
    ("ltx_video", FIXED | {"shift": 3.0}, 3.0),
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
