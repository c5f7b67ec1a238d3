"""This file lists the previews that a config asks for, and reads and checks the files that they need."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from PIL.Image import Image

from diffsynth_lite.config import Config
from diffsynth_lite.data.images import black_or_white, cover, load_image, load_mask
from diffsynth_lite.data.items import small_face
from diffsynth_lite.data.records import is_video
from diffsynth_lite.data.video import clip_times, read_frames
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines import Conditioning, ModelFamily, PreviewRequest
from diffsynth_lite.training.data_settings import fps_of, num_preview_frames, num_preview_layers

logger = logging.getLogger(__name__)

_STARTING_FROM_IMAGES: tuple[RecordKind, ...] = ("edit", "image_to_video", "layers")
"""Kinds of data whose previews start from only an image."""


def input_files(config: Config, place: int) -> tuple[Path, ...]:
    """Files of the image that the preview at ``place`` starts from, and of its last frame."""
    validation = config.validation
    files = (*validation.inputs[place : place + 1], *validation.last_frames[place : place + 1])
    return tuple(Path(file).expanduser() for file in files)


def any_preview(config: Config, family: ModelFamily) -> PreviewRequest:
    """What all previews of a config have in common: no prompt, and no files."""
    validation = config.validation
    width, height = preview_size(config, family)
    return PreviewRequest(
        negative_prompt=validation.negative_prompt,
        conditioning={},
        negative={},
        width=width,
        height=height,
        num_frames=num_preview_frames(config, family),
        num_layers=num_preview_layers(config, family),
        fps=fps_of(config, family),
        num_inference_steps=validation.num_inference_steps,
        guidance_scale=validation.guidance_scale,
        seed=validation.seed,
    )


def build_preview(
    config: Config, family: ModelFamily, place: int, conditioning: Conditioning, negative: Conditioning
) -> PreviewRequest:
    """The preview at ``place`` that the section ``validation`` asks for, with its files decoded."""
    validation, request = config.validation, any_preview(config, family)
    inputs = tuple(load_image(path, background=config.data.background) for path in input_files(config, place))
    if family.edits.keeps_input_size:
        width, height = family.edits.input_size(*inputs[0].size)
        request = replace(request, width=width, height=height)
    return replace(
        request,
        prompt=validation.prompts[place],
        conditioning=conditioning,
        negative=negative,
        inputs=inputs,
        control=_frames(config, family, validation.control[place : place + 1], is_mask=False),
        inpaint_mask=_frames(config, family, validation.inpaint_masks[place : place + 1], is_mask=True),
        face=_faces(config, family, validation.faces[place : place + 1]),
    )


def check_previews(config: Config, family: ModelFamily) -> None:
    """Check prompts, sizes and frames of the previews, and that their files are there, whole, and of use."""
    validation = config.validation
    family.check_size(*preview_size(config, family), keys="validation.width, validation.height")
    if validation.num_frames is not None:
        family.check_frames(validation.num_frames, key="validation.num_frames")
    if validation.prompts or validation.scores:
        _check_sampling(config, family)
    _check_prompts(config, family)
    _check_images_have_effect(config, family)
    _check_guides_have_effect(config, family)
    for key, files in (("inputs", validation.inputs), ("last_frames", validation.last_frames)):
        for path in files:
            file = Path(path).expanduser()
            if not file.is_file():
                raise UserError(f"validation.{key}: there is no file {path}; each of its entries is an image")
            # To the last pixel: the caching pass, which looks for bad items, does not read it.
            image = load_image(file, background=config.data.background)
            try:
                family.edits.input_size(*image.size)
            except UserError as error:
                raise UserError(f"validation.{key}: {path}: {error}") from None
    guides: dict[str, Callable[..., tuple[Image, ...]]] = {
        "control": partial(_frames, is_mask=False),
        "inpaint_masks": partial(_frames, is_mask=True),
        "faces": _faces,
    }
    for key, read in guides.items():
        for path in getattr(validation, key):
            try:
                read(config, family, [path])
            except UserError as error:
                raise UserError(f"validation.{key}: {error}") from None


def _check_sampling(config: Config, family: ModelFamily) -> None:
    validation = config.validation
    if validation.num_inference_steps < family.min_inference_steps:
        raise UserError(
            f"validation.num_inference_steps: {validation.num_inference_steps}, and this model's sampler "
            f"takes at least {family.min_inference_steps}; set it to that or more"
        )
    if validation.guidance_scale > 1 and not family.has_guidance:
        raise UserError(
            f"validation.guidance_scale: {validation.guidance_scale:g} has no effect, as this model is "
            "distilled to generate without guidance; set it to 1"
        )
    if validation.negative_prompt.strip() and family.takes_guidance:
        logger.warning(
            "validation.negative_prompt: has no effect, as this model takes the guidance scale; remove it"
        )
    if family.edits.keeps_input_size and (validation.width or validation.height):
        logger.warning(
            "validation.width, validation.height: have no effect, as previews of this family have the shape "
            "of validation.inputs, in a size of their own; remove them"
        )


def _check_prompts(config: Config, family: ModelFamily) -> None:
    for place, prompt in enumerate(config.validation.prompts):
        family.check_prompt(prompt, f"validation.prompts: number {place + 1}")
    family.check_prompt(config.validation.negative_prompt, "validation.negative_prompt")


def _check_images_have_effect(config: Config, family: ModelFamily) -> None:
    validation = config.validation
    if validation.prompts and family.needs_inputs and not validation.inputs:
        raise UserError(
            "validation.inputs: is empty; previews of this family start from images: name a file for each "
            "of validation.prompts (`sample` takes --input FILE), or give no prompts"
        )
    if validation.inputs and not {*_STARTING_FROM_IMAGES, "inpaint"} & set(family.record_kinds):
        raise UserError(
            "validation.inputs: has no effect, as previews of this family start from the prompt only; "
            "remove it"
        )
    if validation.last_frames and not family.takes_last_frames:
        raise UserError(
            "validation.last_frames: has no effect, as this model does not lead clips to an image; remove it"
        )
    if validation.num_layers is not None and not family.default_num_layers:
        raise UserError(
            "validation.num_layers: has no effect, as this family does not make layers of images; remove it"
        )


def _check_guides_have_effect(config: Config, family: ModelFamily) -> None:
    validation = config.validation
    for key, kind, files in (
        ("control", "control", validation.control),
        ("inpaint_masks", "inpaint", validation.inpaint_masks),
    ):
        if files and kind not in family.record_kinds:
            raise UserError(f"validation.{key}: has no effect, as this family takes none; remove it")
        is_needed = family.record_kinds == (kind,) or (family.takes_faces and kind == "control")
        if validation.prompts and is_needed and not files:
            raise UserError(
                f"validation.{key}: is empty, and this family makes nothing without it: name a file for each "
                "of validation.prompts (`sample` takes --input FILE), or give no prompts"
            )
    if validation.faces and not family.takes_faces:
        raise UserError("validation.faces: has no effect, as this family takes none; remove it")
    if validation.prompts and family.takes_faces and not validation.faces:
        raise UserError(
            "validation.faces: is empty, and this family makes nothing without it: name a clip for each of "
            "validation.prompts, or give no prompts"
        )
    if validation.inpaint_masks and not (validation.inputs or validation.control):
        raise UserError(
            "validation.inpaint_masks: have no effect without validation.inputs, of which they mark the part "
            "that is regenerated; name as many inputs, or remove the masks"
        )
    starts = set(_STARTING_FROM_IMAGES) & set(family.record_kinds)
    if validation.inputs and not starts and not validation.inpaint_masks:
        raise UserError(
            "validation.inputs: has no effect without validation.inpaint_masks, which mark the part that is "
            "regenerated; name as many, or remove it"
        )


def _frames(config: Config, family: ModelFamily, files: list[str], *, is_mask: bool) -> tuple[Image, ...]:
    """The frames of a file in the size, number and times of a preview; none without a file."""
    if not files:
        return ()
    path, num_frames = Path(files[0]).expanduser(), num_preview_frames(config, family)
    if not path.is_file():
        raise UserError(
            f"there is no file {files[0]}; each entry is an image, or a clip where previews are clips"
        )

    def fitted(image: Image) -> Image:
        image = cover(image.convert("L") if is_mask else image, *preview_size(config, family))
        return black_or_white(image) if is_mask else image

    if is_video(path.name):
        if family.frame_step is None:
            raise UserError(f"{path}: is a clip, and this family makes images; give an image")
        fps = fps_of(config, family)
        assert fps is not None, "a family that makes clips has a frame rate"
        return tuple(read_frames(path, clip_times(0.0, num_frames=num_frames, fps=fps), each=fitted))
    if num_frames > 1 and not is_mask:
        raise UserError(f"{path}: is an image, and previews are clips of {num_frames} frames; give a clip")
    image = (
        load_mask(path, white="what is regenerated")
        if is_mask
        else load_image(path, background=config.data.background)
    )
    return (fitted(image),) * num_frames


def _faces(config: Config, family: ModelFamily, files: list[str]) -> tuple[Image, ...]:
    """The frames of a clip of a face, whole, in the number and times of a preview; none without a file."""
    if not files:
        return ()
    path, fps = Path(files[0]).expanduser(), fps_of(config, family)
    if not (path.is_file() and is_video(path.name)):
        raise UserError(f"there is no clip {files[0]}; each entry is a clip of a face")
    assert fps is not None, "a family that takes faces makes clips"
    times = clip_times(0.0, num_frames=num_preview_frames(config, family), fps=fps)
    return tuple(read_frames(path, times, each=small_face))


def data_size(config: Config, family: ModelFamily) -> tuple[int, int]:
    """Width and height of images of the data's first size in pixels, rounded down to what fits."""
    divisor = family.size_divisor
    width, height = (max(divisor, side // divisor * divisor) for side in config.data.first_size)
    return width, height


def preview_size(config: Config, family: ModelFamily) -> tuple[int, int]:
    """Width and height of the previews in pixels: unless given, the data's, rounded down to what fits.

    Where previews keep the size of their own image, that is what one of the data's size comes to.
    """
    width, height = data_size(config, family)
    if family.edits.keeps_input_size:
        return family.edits.input_size(width, height)
    return config.validation.width or width, config.validation.height or height
