"""What guides a preview, and what of it is regenerated, come in the preview's size, number and times."""

from pathlib import Path

import numpy as np
import pytest
from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import calculate_dimensions
from PIL import Image

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.data.video import write_video
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily, load_family
from diffsynth_lite.pipelines.base.release_folder import PipelineFolder, write_release
from diffsynth_lite.pipelines.flux import Flux
from diffsynth_lite.pipelines.longcat_image_edit import LongCatImageEdit
from diffsynth_lite.pipelines.ltx_video import LTXVideo
from diffsynth_lite.training.preview_requests import any_preview, build_preview, check_previews


def own(base: type[ModelFamily], **facts: object) -> type[ModelFamily]:
    """A family that differs from another one in what it takes; its empty folder has no sampler."""
    guidance = {"has_guidance": True, "takes_guidance": False}
    return type("Own", (base,), {"min_inference_steps": 1, **guidance, **facts})


Guided = own(LTXVideo, record_kinds=("control",))
GuidedOrFilled = own(LTXVideo, record_kinds=("control", "inpaint", "video"))
Filled = own(Flux, record_kinds=("inpaint",))
Painted = own(Flux, record_kinds=("inpaint", "image"))
TakenApart = own(Flux, record_kinds=("layers",))
Reading = own(Flux, refused_in_prompts=("<|image_pad|>",))
"""Its pipeline counts the places of images in its texts."""


@pytest.fixture
def config(tmp_path: Path):
    def load(*settings: str) -> Config:
        file = tmp_path / "a.yaml"
        file.write_text("model: {family: flux, path: a}\ndata: {path: a, fps: 2}\noutput: {dir: b}\n")
        return load_config(
            file, ["validation.width=64", "validation.height=32", "data.frame_counts=[9]", *settings]
        ).config

    return load


@pytest.fixture
def guided(tmp_path: Path) -> ModelFamily:
    return Guided(PipelineFolder(path=tmp_path))


@pytest.fixture
def filled(tmp_path: Path) -> ModelFamily:
    return Filled(PipelineFolder(path=tmp_path))


def clip(path: Path, num_frames: int) -> Path:
    frames = [Image.new("RGB", (64, 64), (8 + 12 * number,) * 3) for number in range(num_frames)]
    write_video(path, frames, fps=4)
    return path


def test_a_clip_guides_the_frames_of_its_times_in_the_size_of_the_preview(config, guided, tmp_path):
    path = clip(tmp_path / "c.mp4", 18)
    settings = ("validation.prompts=[a, b]", f"validation.control=[{path}, {path}]")
    check_previews(config(*settings), guided)
    for place in (0, 1):
        media = build_preview(config(*settings), guided, place, {}, {})
        assert {frame.size for frame in media.control} == {(64, 32)}
        shown = [round((frame.getpixel((5, 5))[0] - 8) / 12) for frame in media.control]
        assert shown == list(range(0, 18, 2))
        assert (media.inputs, media.inpaint_mask) == ((), ())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[short.mp4]", r"validation\.control: .*short\.mp4: a frame at 2 s is asked for, but the clip ends"),
        ("[gone.mp4]", r"validation\.control: there is no file .*gone\.mp4; each entry is an image"),
        ("[a.png]", r"validation\.control: .*a\.png: is an image, and previews are clips of 9 frames"),
        ("[]", r"validation\.control: is empty, and this family makes nothing without it"),
    ],
)
def test_what_cannot_guide_a_preview_is_named(config, guided, tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    clip(tmp_path / "short.mp4", 8)
    Image.new("RGB", (64, 32)).save("a.png")
    with pytest.raises(UserError, match=message):
        check_previews(config("validation.prompts=[a]", f"validation.control={given}"), guided)


@pytest.mark.parametrize(
    ("given", "message"), [("inpaint_masks", "have no effect without"), ("inputs", "has no effect without")]
)
def test_a_mask_and_what_it_is_of_are_given_together(config, tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (64, 32), 255).save("a.png")
    family = GuidedOrFilled(PipelineFolder(path=tmp_path))
    alone = "validation.prompts=[a]", f"validation.{given}=[a.png]"
    (other,) = {"inpaint_masks", "inputs"} - {given}
    with pytest.raises(UserError, match=rf"validation\.{given}: {message} validation\.{other}"):
        check_previews(config(*alone), family)
    check_previews(config(*alone, "validation.inputs=[a.png]", "validation.inpaint_masks=[a.png]"), family)


def test_an_image_that_is_split_into_layers_needs_no_mask(config, tmp_path):
    Image.new("RGB", (64, 32)).save(tmp_path / "a.png")
    given = config(
        "validation.prompts=[a]", f"validation.inputs=[{tmp_path}/a.png]", "data.frame_counts=null"
    )
    check_previews(given, TakenApart(PipelineFolder(path=tmp_path)))
    with pytest.raises(UserError, match=r"validation\.inputs: has no effect without"):
        check_previews(given, Painted(PipelineFolder(path=tmp_path)))


def test_a_mask_lies_on_the_preview_as_in_training(config, filled, tmp_path):
    mask = Image.effect_noise((128, 128), 90)
    mask.save(tmp_path / "m.png")
    Image.new("RGB", (64, 32)).save(tmp_path / "a.png")
    settings = ("validation.prompts=[a]", f"validation.inputs=[{tmp_path}/a.png]", "data.frame_counts=null")
    given = config(*settings, f"validation.inpaint_masks=[{tmp_path}/m.png]")
    check_previews(given, filled)
    media = build_preview(given, filled, 0, {}, {})
    [shown] = media.inpaint_mask
    middle = mask.resize((64, 32), Image.Resampling.LANCZOS, box=(0, 32, 128, 96))
    assert np.array_equal(np.asarray(shown) == 255, np.asarray(middle) >= 128)
    assert len(media.inputs) == 1


def test_images_need_a_mask_that_is_one(config, filled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 32)).save("a.png")
    clip(tmp_path / "m.mp4", 9)
    settings = (
        "validation.prompts=[a]",
        "validation.inputs=[a.png]",
        "data.frame_counts=null",
        "data.fps=null",
    )
    for given, message in (
        ("[]", "is empty, and this family makes nothing without it"),
        ("[a.png]", "a mask that is black all over; white is what is regenerated"),
        ("[m.mp4]", "is a clip, and this family makes images"),
    ):
        with pytest.raises(UserError, match=rf"validation\.inpaint_masks: .*{message}"):
            check_previews(config(*settings, f"validation.inpaint_masks={given}"), filled)


def test_a_preview_that_keeps_the_size_of_its_image_is_counted_and_recorded_in_that_size(
    config, tmp_path, caplog
):
    Image.new("RGB", (40, 80)).save(tmp_path / "a.png")
    family = LongCatImageEdit(write_release(LongCatImageEdit.releases[0], tmp_path / "model"))
    images = ("data.frame_counts=null", "data.fps=null", f"validation.inputs=[{tmp_path}/a.png]")
    given = config("validation.prompts=[a]", "data.width=128", "data.height=64", *images)
    check_previews(given, family)
    assert "validation.width, validation.height: have no effect" in caplog.text
    asked, recorded = any_preview(given, family), build_preview(given, family, 0, {}, {})
    assert (recorded.width, recorded.height) == calculate_dimensions(1024**2, 40 / 80)
    assert (asked.width, asked.height) == calculate_dimensions(1024**2, 128 / 64)


def test_guides_that_a_family_does_not_look_at_are_refused(config, guided, filled, tmp_path):
    path = clip(tmp_path / "c.mp4", 18)
    for key, family in (("control", filled), ("inpaint_masks", guided)):
        settings = ("validation.prompts=[a]", f"validation.inputs=[{path}]", f"validation.{key}=[{path}]")
        message = rf"validation\.(inputs|{key}): has no effect"
        with pytest.raises(UserError, match=message):
            check_previews(config(*settings, "data.frame_counts=null"), family)


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("validation.prompts=['a ring', 'a <|image_pad|>']", r"validation\.prompts: number 2"),
        ("validation.negative_prompt='<|image_pad|>'", r"validation\.negative_prompt"),
    ],
)
def test_prompts_that_the_pipeline_refuses_are_named(config, tmp_path, setting, where):
    given = config(setting)
    check_previews(given, Painted(PipelineFolder(path=tmp_path)))
    with pytest.raises(UserError, match=rf"{where} holds <\|image_pad\|>, .*; remove it"):
        check_previews(given, Reading(PipelineFolder(path=tmp_path)))


def test_a_negative_prompt_is_warned_of_where_the_model_takes_the_guidance_scale_itself(
    config, tmp_path, caplog
):
    given = config("validation.prompts=[a]", "validation.negative_prompt=blurry")
    check_previews(given, own(Flux)(PipelineFolder(path=tmp_path)))
    assert "negative_prompt" not in caplog.text
    check_previews(given, own(Flux, takes_guidance=True)(PipelineFolder(path=tmp_path)))
    assert "validation.negative_prompt: has no effect" in caplog.text


@pytest.mark.parametrize(
    ("name", "release"),
    [("flux2", "FLUX.2 klein 4B"), ("krea2", "Krea 2 Turbo"), ("minimax_h3", "MiniMax-H3")],
)
def test_a_scale_of_guidance_is_refused_of_a_model_that_has_none(config, tmp_path, name, release):
    known = {one.name: one for one in load_family(name).releases}
    family = load_family(name)(write_release(known[release], tmp_path / "model"))
    check_previews(config("validation.prompts=[a]", "validation.guidance_scale=1"), family)
    with pytest.raises(UserError, match=r"validation\.guidance_scale: 4 has no effect, .*; set it to 1"):
        check_previews(config("validation.prompts=[a]"), family)
    check_previews(config(), family)
