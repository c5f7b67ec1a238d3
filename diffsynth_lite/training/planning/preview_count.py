"""This file counts what drawing a preview holds on the device: the model, then the autoencoder."""

from contextlib import suppress
from dataclasses import dataclass

import torch
from PIL import Image

from diffsynth_lite.config import Config
from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.planning import StandIns
from diffsynth_lite.lora import without_training_adapter
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.composite import Composite
from diffsynth_lite.training.data_settings import fps_of, num_preview_frames, num_preview_layers
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.without_weights import (
    copied_bytes,
    counted_silently,
    without_weights,
)
from diffsynth_lite.training.preview_requests import preview_size

_NUM_STEPS = 2
"""Denoising steps: each holds what the one before did, and some samplers take no fewer."""


@dataclass(frozen=True, kw_only=True)
class PreviewBytes:
    """What drawing holds on the device beside the model that is trained.

    Attributes:
        weights: of what is loaded to draw, but for the model.
        calls: most beside all weights.
        calls_in_tiles: likewise, where the autoencoder decodes in tiles, as it does when the device is full.
        copies: in host memory while these weights are loaded.
    """

    weights: int
    calls: int
    calls_in_tiles: int
    copies: int


def count_preview(
    config: Config, family: ModelFamily, counter: MemoryCounter, settings: StepSettings
) -> PreviewBytes:
    """A preview, drawn by the family's own pipeline, with a prompt as long as may be.

    Args:
        counter: has the model.
        settings: in which it is kept.

    Raises:
        UserError: what the family loads cannot be counted.
    """
    counted = StandIns()
    # All experts, also those that are not trained.
    copied = without_weights(family, counted, trained=family.denoisers, vae_tiling=config.model.vae_tiling)
    models = {
        name: counted.put(counter.model_that_draws(settings), name, repeated=("",)) for name in copied.trained
    }
    model = Composite(models) if len(models) > 1 else models[copied.trained[0]]
    # Not every family decodes in tiles when the device is full.
    full = suppress(torch.OutOfMemoryError)
    with counted_silently(), evaluation_mode(model), without_training_adapter(model), full:
        copied.sample(model, getattr(torch, config.model.vae_dtype), [preview_request(config, copied)])
    # Of the two that decode, the second is in tiles.
    decoded = [call.peak for call in counted.calls if call.method == "decode"]
    others = [call.peak for call in counted.calls if call.method != "decode"]
    loaded = copied.loaded.items()
    return PreviewBytes(
        weights=sum(weight.nbytes for _, one in loaded for weight in one.parameters()),
        calls=counted.peak,
        calls_in_tiles=max(*others, decoded[-1]),
        copies=sum(copied_bytes(family, config.model.path, name, one) for name, one in loaded),
    )


def preview_request(config: Config, family: ModelFamily) -> PreviewRequest:
    """A preview as a run draws it, but in few steps, with a prompt of ones as long as may be."""
    validation = config.validation
    width, height = preview_size(config, family)
    num_frames = num_preview_frames(config, family)
    num_layers = num_preview_layers(config, family)
    conditioning = family.example_conditioning(family.latents_shape(width, height, num_frames + num_layers))
    assert conditioning is not None, "training steps were counted before"
    num_inputs = bool(validation.inputs or family.needs_inputs) + bool(validation.last_frames)
    has_control = bool(validation.control) or family.record_kinds == ("control",)
    has_mask = bool(validation.inpaint_masks) or family.record_kinds == ("inpaint",)
    return PreviewRequest(
        conditioning=conditioning,
        negative=conditioning,
        inputs=(Image.new("RGB", (width, height)),) * num_inputs,
        control=(Image.new("RGB", (width, height)),) * num_frames * has_control,
        inpaint_mask=(Image.new("L", (width, height), 255),) * num_frames * has_mask,
        width=width,
        height=height,
        num_frames=num_frames,
        fps=fps_of(config, family),
        num_layers=num_layers,
        num_inference_steps=_NUM_STEPS,
        guidance_scale=validation.guidance_scale,
        seed=validation.seed,
    )
