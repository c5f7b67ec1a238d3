"""This file sets what a config leaves to the trainer: ``memory.stream_blocks: auto``."""

import logging
import math
from dataclasses import replace

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.distributed import on_all_processes
from diffsynth_lite.training.planning.choices import least_streamed
from diffsynth_lite.training.planning.device_speed import COUNTED_SHARE
from diffsynth_lite.training.planning.subject import counter_of, step_settings
from diffsynth_lite.training.streaming import check_stream

logger = logging.getLogger(__name__)


def with_streamed_blocks(config: Config, family: ModelFamily, accelerator: Accelerator) -> Config:
    """A config in which ``memory.stream_blocks: auto`` is a number: as few blocks as fit all devices.

    Raises:
        UserError: a step does not fit with all of them, or the host has too little memory for that many; or
            what ``counter_of`` raises.
    """
    if config.memory.stream_blocks != "auto":
        return config
    plain = _with_number(config, 0)
    device_bytes = min(on_all_processes(accelerator, lambda: _device_bytes(config, accelerator.device)))
    if math.isinf(device_bytes):
        logger.info("memory.stream_blocks: auto streams nothing: the device is the host.")
        return plain
    counter, settings = counter_of(plain, family), step_settings(plain, family)
    streamed = least_streamed(counter, settings, device_bytes)
    if streamed is None:
        least = counter.count(replace(settings, stream_blocks="all")).device
        raise UserError(
            f"memory.stream_blocks: auto; with all blocks streamed a step takes {format_bytes(least)} by "
            f"count, and {format_bytes(int(device_bytes))} may be taken: `diffsynth-lite plan` says what fits"
        )
    chosen = _with_number(config, int(streamed.stream_blocks))
    frozen = family.empty_transformer().requires_grad_(False)
    check_stream(chosen, family, frozen, counter.num_blocks, accelerator.device)
    logger.info(
        "memory.stream_blocks: auto streams %d of %d blocks: a step takes %s by count, of %s.",
        chosen.memory.stream_blocks,
        counter.num_blocks,
        format_bytes(counter.count(streamed).device),
        format_bytes(int(device_bytes)),
    )
    return chosen


def _with_number(config: Config, number: int) -> Config:
    return config.model_copy(update={"memory": config.memory.model_copy(update={"stream_blocks": number})})


def _device_bytes(config: Config, device: torch.device) -> float:
    """What training steps may take of a device; infinite on the CPU."""
    if config.memory.device_gib is not None:
        return config.memory.device_gib * 1024**3
    if device.type != "cuda":
        return math.inf
    free, _ = torch.cuda.mem_get_info(device)
    return COUNTED_SHARE * free
