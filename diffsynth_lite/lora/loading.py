"""This file finds out how a pipeline of diffusers loads a LoRA file, layer by layer, without any weights.

A pipeline may leave out names that it does not know without an error, and has rules of its own for the
strength of an update. These are not guessed: its own ``load_lora_weights`` runs, on models whose weights are
zeros that take no memory, with numbers in the LoRA that identify its tensors. If a pipeline has no such
method, the models' own ``load_lora_adapter`` does.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from diffusers.utils import logging as diffusers_logging
from peft.tuners.lokr.layer import LoKrLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from diffsynth_lite.lora.layers import MAGNITUDE

_ADAPTER = "asked"


@dataclass(frozen=True, kw_only=True)
class LoadedLayer:
    """The tensors that a layer is given.

    Attributes:
        parts: names in the file of the tensors that it is given, by the ends of peft's names, such as
            ``.lora_A.weight``.
        scale: factor of their product.
    """

    parts: Mapping[str, str]
    scale: float


_MATRICES = {
    ".lora_A.weight": "lora_A",
    ".lora_B.weight": "lora_B",
    MAGNITUDE: "lora_magnitude_vector",
    **{f".{name}": name for name in LoKrLayer.adapter_layer_names},
}
"""Attributes of peft's layers with trained tensors, by the ends of the tensors' names."""


FileHeader: TypeAlias = tuple[tuple[str, tuple[int, ...], float | None], ...]
"""Name and shape of each tensor of a LoRA file, and the value of those without an axis."""


def header_of(tensors: Mapping[str, Tensor]) -> FileHeader:
    """The header of a file with these tensors, which may be on the meta device."""
    return tuple(
        (name, tuple(tensor.shape), None if tensor.ndim else float(tensor))
        for name, tensor in sorted(tensors.items())
    )


def loaded_layers(
    pipeline: Any, models: Mapping[str, nn.Module], header: FileHeader
) -> dict[tuple[str, str], LoadedLayer]:
    """The tensors of a LoRA file that a pipeline gives each layer.

    Args:
        pipeline: made of ``models``; None where it loads no LoRA, and each of them does.
        models: on the meta device, by their names in the pipeline; not usable afterwards.

    Returns:
        By name of the model and of the layer in it; layers that get an update of zero are left out.

    Raises:
        ValueError: the pipeline refuses these names, or gives a layer something that is not in the file.
    """
    for model in models.values():
        _become_weightless(model)
    names = [name for name, _, _ in header]
    tensors = {
        name: _filled(place + 1 if number is None else number, shape)
        for place, (name, shape, number) in enumerate(header)
    }
    with _in_silence():
        if pipeline is not None:
            pipeline.load_lora_weights(tensors, adapter_name=_ADAPTER)
        for name, model in models.items() if pipeline is None else ():
            loader: Any = model
            loader.load_lora_adapter(tensors, adapter_name=_ADAPTER, prefix=name)

    def name_of(weight: Tensor) -> str | None:
        number = weight.flatten()[0].item()
        if number not in range(len(names) + 1):
            raise ValueError("diffusers gives a layer something that is not a tensor of the file")
        return names[int(number) - 1] if number else None

    layers = {}
    for model_name, model in models.items():
        for name, module in model.named_modules():
            if not isinstance(module, BaseTunerLayer) or _ADAPTER not in module.scaling:
                continue
            parts = {ending: name_of(weight) for ending, weight in _weights_of(module)}
            given = {ending: part for ending, part in parts.items() if part}
            if len(given) == len(parts):  # an update of which a matrix is missing is zero
                scale = float(module.scaling[_ADAPTER])
                layers[model_name, name] = LoadedLayer(parts=given, scale=scale)
    return layers


def _weights_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The trained tensors of a layer, by the ends of peft's names."""
    for ending, attribute in _MATRICES.items():
        held: Any = getattr(module, attribute, {})
        if _ADAPTER in held:
            yield ending, getattr(held[_ADAPTER], "weight", held[_ADAPTER])


def _become_weightless(model: nn.Module) -> None:
    """Replace the tensors of a model on the meta device by zeros on the CPU, each of one number in memory."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(_filled(0, weight.shape), requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _filled(0, buffer.shape).to(buffer.dtype))


def _filled(number: float, shape: tuple[int, ...]) -> Tensor:
    return torch.tensor(float(number)).expand(shape)


@contextmanager
def _in_silence() -> Iterator[None]:
    """Scope in which the libraries do not log which models get no LoRA, what they miss in it, or refuse."""
    loggers = (diffusers_logging, transformers_logging)
    before = [logger.get_verbosity() for logger in loggers]
    for logger in loggers:
        logger.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, verbosity in zip(loggers, before, strict=True):
            logger.set_verbosity(verbosity)
