"""This file checks how frozen weights are to be kept, in blocks and text encoders, before any load."""

from collections.abc import Mapping

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.core.transfer.backends import smallest_worth_moving
from diffsynth_lite.core.transfer.host_pool import available_host_bytes, num_local_processes
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights import (
    MissingKernelsError,
    Quantization,
    WeightFormat,
    require_saving,
    weight_format,
)
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import layers_ending_in
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.quantized import quantizable_layers
from diffsynth_lite.pipelines.base.text_encoders import (
    TextEncoderMemory,
    encoder_quantizations,
    transformer_layers,
)


def require_format(name: str, *, key: str) -> WeightFormat:
    """The format of a name.

    Args:
        key: the setting that names it.

    Raises:
        UserError: its kernels are not installed.
    """
    try:
        return weight_format(name)
    except MissingKernelsError as error:
        raise UserError(
            f"{key}: {name} needs {error}, which is not installed: pip install {error}; or set int8"
        ) from None


def transformer_quantization(
    family: ModelFamily, transformer: torch.nn.Module, config: Config, device: torch.device
) -> Quantization | None:
    """How a run keeps the linear layers in the blocks of what it trains; None where they stay as they are.

    Raises:
        UserError: the setting has no effect or leaves out all layers, or the format's kernels are missing.
    """
    name, skipped = config.model.quantize, config.model.quantize_skip
    if name == "none":
        return None
    weights = require_format(name, key="model.quantize")
    model = family.parts_of(transformer)[family.trained[0]]
    layers = quantizable_layers(model, family.block_lists)
    if not layers:
        raise UserError(
            f"model.quantize: {name} has no effect, as the blocks of this model have no linear layers; "
            "set it to none"
        )
    owner = f"the blocks of {type(model).__name__}"
    left_out = set(layers_ending_in(layers, skipped, key="model.quantize_skip", owner=owner))
    if left_out == set(layers):
        raise UserError(
            f"model.quantize_skip: {', '.join(skipped)} leave out all {len(layers)} layers; "
            "take some off the list, or set model.quantize: none"
        )
    kept = tuple(layer for layer in layers if layer not in left_out)
    return Quantization(format=weights, layers=kept, device=device)


def text_encoder_memory(config: Config, family: ModelFamily, device: torch.device) -> TextEncoderMemory:
    """How a run keeps the family's text encoders while they encode, on the device and in host memory.

    Raises:
        UserError: a setting has no effect, nothing would be saved, the kernels of a format are missing, or
            the host has too little memory.
    """
    quantizes, streams = config.model.text_encoder_quantize != "none", config.memory.stream_text_encoder
    if not quantizes and not streams:
        return TextEncoderMemory()
    encoders = _frozen_text_encoders(family)
    if not any(map(transformer_layers, encoders.values())):
        key = "model.text_encoder_quantize" if quantizes else "memory.stream_text_encoder"
        reason = "lora.components names the text encoders, which stay in model.dtype, on the device"
        if set(family.text_encoders) - set(family.trained):
            reason = "no transformer layers are known of the text encoder"
        raise UserError(f"{key}: has no effect, as {reason}; leave it out")
    weights = None
    if quantizes:
        weights = require_format(config.model.text_encoder_quantize, key="model.text_encoder_quantize")
    memory = TextEncoderMemory(
        quantizations=encoder_quantizations(encoders, weights, device) if weights else {},
        num_slots=config.memory.stream_slots if streams else 0,
        min_bytes=config.memory.min_bytes,
    )
    if streams:
        _check_stream(config, memory, encoders, device)
    return memory


def _frozen_text_encoders(family: ModelFamily) -> dict[str, torch.nn.Module]:
    """Those that are not trained, by component, on the meta device, where they can be built so."""
    names = [name for name in family.text_encoders if name not in family.trained]
    built = {name: family.empty_component(name) for name in names}
    return {name: encoder.requires_grad_(False) for name, encoder in built.items() if encoder is not None}


def _check_stream(
    config: Config,
    memory: TextEncoderMemory,
    encoders: Mapping[str, torch.nn.Module],
    device: torch.device,
) -> None:
    for name, encoder in encoders.items():
        encoder.to(getattr(torch, config.model.text_encoder_dtype))
        if name in memory.quantizations:
            memory.quantizations[name].apply_to(encoder)
    stacks = memory.streamed_layers(list(encoders.values()))
    if not stacks:
        raise UserError(
            "memory.stream_text_encoder: the text encoder has no more layers than memory.stream_slots, "
            f"{config.memory.stream_slots}, so that all would stay on the device; take fewer slots, or set "
            "it to false"
        )
    min_bytes = config.memory.min_bytes
    min_bytes = smallest_worth_moving(device) if min_bytes is None else min_bytes
    try:
        require_saving(stacks, device, num_slots=config.memory.stream_slots, min_bytes=min_bytes)
    except ValueError as error:
        raise UserError(f"memory.stream_text_encoder: {error}") from None
    _, num_bytes = memory.num_bytes(list(encoders.values()), device)
    # Each process encodes when it has something to encode, and loads for itself.
    total, available = num_local_processes() * num_bytes, available_host_bytes()
    if available is not None and total > available:
        raise UserError(
            f"memory.stream_text_encoder: the layers take {format_bytes(total)} of host memory, a copy for "
            f"each process, and {format_bytes(available)} are available; set model.text_encoder_quantize, or "
            "end what else runs on this machine"
        )
