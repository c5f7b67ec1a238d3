"""This file estimates the memory of encoding the longest prompt and the largest media, and of a preview."""

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from PIL import Image

from diffsynth_lite.config import Config
from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.planning.stand_ins import StandIns
from diffsynth_lite.core.weights.formats import counted_format
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.lora import without_training_adapter
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines import ModelFamily, PreviewRequest
from diffsynth_lite.pipelines.base.composite import Composite
from diffsynth_lite.pipelines.base.text_encoders import TextEncoderMemory, encoder_quantizations
from diffsynth_lite.pipelines.base.vae_tiles import has_frames
from diffsynth_lite.training.planning.memory_count import MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings
from diffsynth_lite.training.planning.without_weights import (
    copied_bytes,
    counted_silently,
    frozen_component,
    without_weights,
)
from diffsynth_lite.training.preview_requests import any_preview

_META, _CPU = torch.device("meta"), torch.device("cpu")
_WORDS = 100
_RGB, _RGBA = 3, 4
_COPIES_OF_PIXELS = 3
"""Copies in fp32 that diffusers' processors hold while they make a tensor of a clip: 3.0 were measured with
81 frames of 832 x 480. The frames in 8 bits are added."""


@dataclass(frozen=True, kw_only=True)
class LoadedBytes:
    """Bytes that an encoder takes, or what is loaded to generate previews.

    Attributes:
        device: weights on the device, with the slots of streamed ones.
        calls: peak on the device in addition to all weights.
        host: weights in host memory.
        passing: peak in host memory in addition, while it is loaded or its inputs are read.
        calls_in_tiles: of previews, ``calls`` where the autoencoder decodes in tiles, as on a full device.
    """

    device: int = 0
    calls: int = 0
    host: int = 0
    passing: int = 0
    calls_in_tiles: int = 0


def count_prompt_encoder(config: Config, family: ModelFamily, size: Bucket, num_inputs: int) -> LoadedBytes:
    """The text encoders that are not trained, with a prompt as long as may be; prompts come one by one.

    Args:
        size: of the images to edit, which the text encoder may see.
    """
    dtype = getattr(torch, config.model.text_encoder_dtype)
    names = [name for name in family.text_encoders if name not in family.trained]
    encoders = {name: frozen_component(family, name, dtype) for name in names}
    copies = sum(copied_bytes(family, config.model.path, name, encoder) for name, encoder in encoders.items())
    quantizations = {}
    if config.model.text_encoder_quantize != "none":
        weights = counted_format(config.model.text_encoder_quantize)
        quantizations = encoder_quantizations(encoders, weights, _META)
    memory = TextEncoderMemory(
        quantizations=quantizations,
        num_slots=config.memory.stream_slots if config.memory.stream_text_encoder else 0,
        min_bytes=config.memory.min_bytes,
    )
    for name, quantization in quantizations.items():
        quantization.apply_to(encoders[name])
    on_device, on_host = memory.num_bytes(list(encoders.values()), _META)
    is_filled_in_place = bool(quantizations) or on_host > 0
    return LoadedBytes(
        device=on_device,
        calls=_calls_with_longest_prompt(family, memory, dtype, size, num_inputs),
        host=on_host,
        passing=0 if is_filled_in_place else copies,
    )


def _calls_with_longest_prompt(
    family: ModelFamily, memory: TextEncoderMemory, dtype: torch.dtype, size: Bucket, num_inputs: int
) -> int:
    counted = StandIns()
    copied = without_weights(family, counted, trained=family.trained)
    # The place of the weights does not change the memory of calls.
    copied.text_encoder_memory = TextEncoderMemory(quantizations=memory.quantizations)
    # Qwen-Image encodes twice as many tokens as it keeps; with images, nothing is cut.
    sees_images = family.edits.prompt_sees_images
    num_tokens = family.max_prompt_tokens * (1 if sees_images else 2)
    images = [Image.new("RGB", (size.width, size.height))] * (num_inputs if sees_images else 0)
    with counted_silently():
        empty, full = copied.prompt_lengths(["", "word " * _WORDS])
        text = "word " * math.ceil(num_tokens / (full - empty) * _WORDS)
        encode = copied.load_prompt_encoder(dtype, _CPU)
        for one in (text, "word"):  # a short one that is padded is held with a mask of length squared
            encode([Prompt(text=one, images=tuple(images))])
    return counted.peak


def count_media_encoder(config: Config, family: ModelFamily, size: Bucket, num_inputs: int) -> LoadedBytes:
    """The autoencoder and models that are loaded with it, with an image or clip; these come one by one."""
    dtype = getattr(torch, config.model.vae_dtype)
    counted = StandIns()
    copied = without_weights(family, counted, trained=family.trained, vae_tiling=config.model.vae_tiling)
    with counted_silently():
        copied.load_media_encoder(dtype, _CPU)
    vae = copied.loaded["vae"]
    sizes = [(size.width, size.height, size.num_frames)]
    if num_inputs:
        sizes.append((*family.edits.input_size(size.width, size.height, num_inputs), 1))
    channels: int = vae.config.get("input_channels", vae.config.get("in_channels", _RGB))
    if channels != _RGBA:  # some that take patches of images have the channels of a patch here
        channels = _RGB
    for width, height, num_frames in sizes:
        frames = [num_frames] if has_frames(vae) else []
        with torch.no_grad():
            vae.encode(torch.zeros((), dtype=dtype).expand(1, channels, *frames, height, width))
    copies = sum(copied_bytes(family, config.model.path, name, one) for name, one in copied.loaded.items())
    pixels = channels * size.width * size.height * size.num_images
    return LoadedBytes(
        device=sum(weight.nbytes for one in copied.loaded.values() for weight in one.parameters()),
        calls=counted.peak,
        passing=max(copies, pixels * (1 + _COPIES_OF_PIXELS * torch.float32.itemsize)),
    )


_NUM_STEPS = 2
"""Denoising steps: each takes as much memory as the others, and some samplers take no fewer."""


def count_preview(
    config: Config, family: ModelFamily, counter: MemoryCounter, settings: StepSettings
) -> LoadedBytes:
    """A preview, generated by the family's own pipeline, with a prompt as long as may be."""
    counted = StandIns()
    # All experts, also those that are not trained.
    copied = without_weights(family, counted, trained=family.denoisers, vae_tiling=config.model.vae_tiling)
    models = {name: counted.put(counter.preview_model(settings), repeated=("",)) for name in copied.trained}
    model = Composite(models) if len(models) > 1 else models[copied.trained[0]]
    # Not every family decodes in tiles when the device is full.
    full = suppress(torch.OutOfMemoryError)
    with counted_silently(), evaluation_mode(model), without_training_adapter(model), full:
        copied.sample(model, getattr(torch, config.model.vae_dtype), [preview_request(config, copied)])
    # Of the two that decode, the second is in tiles.
    decoded = [peak for method, peak in counted.peaks if method == "decode"]
    others = [peak for method, peak in counted.peaks if method != "decode"]
    loaded = copied.loaded.items()
    return LoadedBytes(
        device=sum(weight.nbytes for _, one in loaded for weight in one.parameters()),
        calls=counted.peak,
        passing=sum(copied_bytes(family, config.model.path, name, one) for name, one in loaded),
        calls_in_tiles=max(*others, decoded[-1]),
    )


def preview_request(config: Config, family: ModelFamily) -> PreviewRequest:
    """A preview as a run generates it, but in few steps, with a prompt of ones as long as may be."""
    validation, request = config.validation, any_preview(config, family)
    size, num_frames = (request.width, request.height), request.num_frames
    conditioning = family.example_conditioning(family.latents_shape(*size, num_frames + request.num_layers))
    assert conditioning is not None, "training steps were counted before"
    num_inputs = bool(validation.inputs or family.needs_inputs) + bool(validation.last_frames)
    has_control = bool(validation.control) or family.takes_faces or family.record_kinds == ("control",)
    has_mask = bool(validation.inpaint_masks) or family.record_kinds == ("inpaint",)
    return replace(
        request,
        conditioning=conditioning,
        negative=conditioning,
        inputs=(Image.new("RGB", size),) * num_inputs,
        control=(Image.new("RGB", size),) * num_frames * has_control,
        inpaint_mask=(Image.new("L", size, 255),) * num_frames * has_mask,
        face=(Image.new("RGB", size),) * num_frames * family.takes_faces,
        num_inference_steps=_NUM_STEPS,
    )
