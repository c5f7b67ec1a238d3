"""This file counts what a run is going to save, and checks that the disk holds it, before weights load."""

import logging

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import free_disk_bytes
from diffsynth_lite.media import STRIP_FRAMES
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.checkpoint.store import CheckpointStore, SavedBytes
from diffsynth_lite.training.checks import CheckedRun, preview_size
from diffsynth_lite.training.data_settings import num_preview_frames

logger = logging.getLogger(__name__)

_BYTES_PER_PIXEL = 3
"""Of a PNG at most, but for its headers: what cannot be compressed stays as it is."""


def require_room(config: Config, checked: CheckedRun, store: CheckpointStore, start_step: int) -> None:
    """Check that the disk holds the checkpoints and LoRA files of a run; warn where previews may fill it.

    Args:
        store: of the run's checkpoints.
        start_step: optimizer steps done.

    Raises:
        UserError: it does not, and one of the saves would end the run.
    """
    if start_step >= config.train.steps:
        return
    saved = SavedBytes.of(
        checked.num_lora_weights,
        lora_dtype=getattr(torch, config.output.lora_dtype),
        has_average=config.train.ema_decay is not None,
    )
    num_there, folder = len(store.steps()), store.folder.parent
    num_more = num_checkpoints_to_come(config, num_there=num_there, start_step=start_step)
    # A LoRA file is written beside the one that it replaces.
    needed = num_more * saved.checkpoint + (1 if num_there else 2) * saved.lora
    free = free_disk_bytes(folder)
    if free < needed:
        raise UserError(
            f"output.dir: checkpoints (at most {num_more} more at once) and LoRA files take about "
            f"{format_bytes(needed)}, and {format_bytes(free)} are free at {folder}; make room, keep fewer "
            "(output.keep_checkpoints, output.keep_every_steps), or set another output.dir"
        )
    previews = preview_bytes(config, checked.family, start_step)
    if free < needed + previews:
        logger.warning(
            "output.dir: previews may take up to %s beside the %s of checkpoints and LoRA files, and %s are "
            "free at %s. A disk that they fill ends the run at its next checkpoint: draw fewer or smaller "
            "ones (validation.every_steps, validation.width, validation.height), or make room.",
            *(format_bytes(previews), format_bytes(needed), format_bytes(free), folder),
        )


def num_checkpoints_to_come(config: Config, *, num_there: int, start_step: int) -> int:
    """How many more checkpoints there are at most at once: an old one goes when the new one is complete."""
    output, steps = config.output, config.train.steps
    saved = {*range(0, steps, output.checkpoint_every_steps), steps}
    due = sorted(step for step in saved if step > start_step)
    num_rotating = output.keep_checkpoints + 1 - min(num_there, output.keep_checkpoints)
    for_good = [step for step in due if output.keep_every_steps and step % output.keep_every_steps == 0]
    has_best = output.keep_best and config.validation.data is not None and not num_there
    return len({*due[-num_rotating:], *for_good}) + has_best


def preview_bytes(config: Config, family: ModelFamily, start_step: int) -> int:
    """What the previews to come take at most; of clips the strips of their frames, the MP4 not counted."""
    steps, every = config.train.steps, config.validation.every_steps or config.train.steps
    drawn = {*range(0, steps, every), steps}
    num_times: int = sum(step > start_step or step == start_step == 0 for step in drawn)
    width, height = preview_size(config, family)
    num_frames = min(num_preview_frames(config, family), STRIP_FRAMES)
    picture: int = _BYTES_PER_PIXEL * width * height * num_frames
    return num_times * len(config.validation.prompts) * picture
