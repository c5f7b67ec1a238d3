"""This file tells block calls apart that may run different operators, or need other results in backward."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffsynth_lite.core.gradient.arguments import describe_template
from diffsynth_lite.core.gradient.call_sites import is_compiled

_PLAIN = frozenset([bool, int, float, str, type(None)])
_FOLLOWED = frozenset([nn.Parameter, Tensor])


def call_signature(tensors: Sequence[Tensor], template: Any) -> Hashable | None:
    """Equal for arguments of the same shapes and settings.

    Args:
        tensors: those among a block's arguments.
        template: the rest of them, from ``take_tensors``.

    Returns:
        None for arguments that are not followed: tensor subclasses, and others than tensors, numbers and
        texts.
    """
    arguments = describe_template(template)
    if arguments is None or any(type(tensor) not in _FOLLOWED for tensor in tensors):
        return None
    inputs = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
    devices = {"cpu"} | {tensor.device.type for tensor in tensors}
    autocast = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in sorted(devices)
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    )
    return arguments, inputs, autocast


def block_signature(module: nn.Module) -> Hashable | None:
    """Equal for blocks of the same classes, settings and parameter shapes, with the same parameters frozen.

    Returns:
        None for blocks that are not followed: compiled ones, and those with parameters of other classes, such
        as sharded ones, whose collectives no process may run on its own.
    """
    parts: list[Hashable] = []
    return tuple(parts) if not is_compiled(module) and _add_parts(module, parts) else None


def _add_parts(module: nn.Module, parts: list[Hashable]) -> bool:
    """Append class, settings and parameters of a module and of those in it; False if one is not followed."""
    # The module's own dictionaries are read: with named_modules and named_parameters it took three times as
    # long.
    parts.append((type(module), len(module._forward_hooks), len(module._forward_pre_hooks)))
    for name, value in vars(module).items():
        if type(value) in _PLAIN:
            parts.append((name, value))
        elif type(value) is list:
            # The active adapters of peft's layers.
            parts.append((name, repr(value)))
        elif not name.startswith("_"):
            # Such as the processor of an attention layer.
            parts.append((name, type(value)))
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter) not in _FOLLOWED:
            return False
        parts.append((name, parameter.shape, parameter.dtype, parameter.requires_grad))
    return all(_add_parts(child, parts) for child in module._modules.values() if child is not None)
