"""This file checks the settings of previews against what the family draws: sizes, frames, pictures."""

from pathlib import Path

from diffsynth_lite.config import Config
from diffsynth_lite.data import load_image
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily


def check_previews(config: Config, family: ModelFamily) -> None:
    """Check sizes and frames, and that the pictures are there, whole, and looked at by the family.

    Raises:
        UserError: naming the key, and what would do.
    """
    validation = config.validation
    family.check_size(*preview_size(config, family), keys="validation.width, validation.height")
    if validation.num_frames is not None:
        family.check_frames(validation.num_frames, key="validation.num_frames")
    _check_pictures_have_effect(config, family)
    for key, files in (("inputs", validation.inputs), ("last_frames", validation.last_frames)):
        for path in files:
            # To the last pixel: the caching pass looks for bad items, and a preview is none.
            picture = load_image(Path(path).expanduser(), background=config.data.background)
            try:
                family.input_size(*picture.size)
            except UserError as error:
                raise UserError(f"validation.{key}: {path}: {error}") from None


def _check_pictures_have_effect(config: Config, family: ModelFamily) -> None:
    validation = config.validation
    if validation.prompts and family.needs_inputs and not validation.inputs:
        raise UserError(
            "validation.inputs: is empty; previews of this family start from pictures: name a file for each "
            "of validation.prompts, or give no prompts"
        )
    if validation.inputs and not {"edit", "image_to_video"} & set(family.record_kinds):
        raise UserError(
            "validation.inputs: has no effect, as previews of this family start from the prompt alone; "
            "remove it"
        )
    if validation.last_frames and not family.takes_last_frames:
        raise UserError(
            "validation.last_frames: has no effect, as this model leads a clip to no picture; remove it"
        )


def preview_size(config: Config, family: ModelFamily) -> tuple[int, int]:
    """Width and height of the previews in pixels: unless given, the data's, as the family can do them."""
    divisor = family.size_divisor
    width, height = (max(divisor, side // divisor * divisor) for side in config.data.first_size)
    return config.validation.width or width, config.validation.height or height
