"""This file counts the bytes that a run will save, and checks before weights load that the disk holds
them."""

import logging

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import free_disk_bytes
from diffsynth_lite.media import STRIP_FRAMES
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.checkpoint.store import CheckpointStore, SavedBytes
from diffsynth_lite.training.checks import CheckedRun
from diffsynth_lite.training.data_settings import num_preview_frames, num_preview_layers
from diffsynth_lite.training.preview_requests import preview_size

logger = logging.getLogger(__name__)

_NUM_ALWAYS_KEPT = 2
"""The newest checkpoint, and the one before it: until a step from the newest has had a finite loss."""
_BYTES_PER_PIXEL = 3
"""At most, in a PNG without its headers: content that cannot be compressed stays as it is."""


def require_disk_space(config: Config, checked: CheckedRun, store: CheckpointStore, start_step: int) -> None:
    """Check that the disk holds the checkpoints and LoRA files of a run."""
    needed, free = _needed_bytes(config, checked, store, start_step), free_disk_bytes(store.folder)
    if free < needed:
        raise UserError(
            "output.dir: the checkpoints that exist at once and the LoRA files take about "
            f"{format_bytes(needed)} more, and {format_bytes(free)} are free at {store.folder.parent}; free "
            "space, keep fewer (output.keep_checkpoints, output.keep_every_steps), or set another output.dir"
        )


def warn_of_previews(config: Config, checked: CheckedRun, store: CheckpointStore, start_step: int) -> None:
    """Warn where the previews to come may fill the disk, so that it does not hold the checkpoints."""
    needed, free = _needed_bytes(config, checked, store, start_step), free_disk_bytes(store.folder)
    previews = preview_bytes(config, checked.family, start_step)
    if previews and free < needed + previews:
        logger.warning(
            "output.dir: previews may take up to %s next to the %s of checkpoints and LoRA files, and %s are "
            "free at %s. A full disk ends the run at its next checkpoint: generate fewer or smaller previews "
            "(validation.every_steps, validation.width, validation.height), or free space.",
            *(format_bytes(previews), format_bytes(needed), format_bytes(free), store.folder.parent),
        )


def num_checkpoints_to_come(config: Config, *, num_there: int, start_step: int) -> int:
    """How many more checkpoints exist at most at once: an old one is removed when a new one is complete."""
    output, steps = config.output, config.train.steps
    if start_step >= steps:
        return 0
    every, is_odd = output.checkpoint_every_steps, steps % output.checkpoint_every_steps > 0
    regular = range(every * (start_step // every + 1), steps + 1, every)
    num_kept = max(output.keep_checkpoints, _NUM_ALWAYS_KEPT)
    num_rotating = min(len(regular) + is_odd, num_kept + 1 - min(num_there, num_kept))
    # Those that are never removed, before the last ones.
    last = regular[len(regular) + is_odd - num_rotating :]
    for_good = output.keep_every_steps or steps + 1
    num_for_good = (last[0] - 1 if last else steps) // for_good - start_step // for_good
    has_best = output.keep_best and config.validation.data is not None and not num_there
    return num_rotating + num_for_good + has_best


def preview_bytes(config: Config, family: ModelFamily, start_step: int) -> int:
    """Most bytes of the previews to come; of videos the strips of their frames, without the MP4."""
    steps, every = config.train.steps, config.validation.every_steps or config.train.steps
    if start_step >= steps:
        return 0
    num_times = steps // every - start_step // every + (steps % every > 0) + (start_step == 0)
    width, height = preview_size(config, family)
    # Layers are in the strip, and in a file each.
    num_layers = 2 * num_preview_layers(config, family)
    num_images = num_layers or min(num_preview_frames(config, family), STRIP_FRAMES)
    image: int = _BYTES_PER_PIXEL * width * height * num_images
    return num_times * len(config.validation.prompts) * image


def _needed_bytes(config: Config, checked: CheckedRun, store: CheckpointStore, start_step: int) -> int:
    saved = SavedBytes.of(
        checked.num_lora_weights,
        num_in_vectors=checked.num_in_vectors,
        optimizer_bytes=checked.optimizer.state_bytes,
        lora_dtype=getattr(torch, config.output.lora_dtype),
        has_average=config.train.ema_decay is not None or checked.optimizer.has_average,
    )
    num_there = len(store.steps())
    num_more = num_checkpoints_to_come(config, num_there=num_there, start_step=start_step)
    # A LoRA file is written next to the one that it replaces.
    return num_more * saved.checkpoint + (1 if num_there else 2) * saved.lora
