"""This file tells block calls apart that may run different operators."""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diffsynth_lite.core.gradient.arguments import describe_template

_PLAIN = frozenset([bool, int, float, str])
_FOLLOWED = frozenset([nn.Parameter, Tensor])


def block_signature(module: nn.Module, tensors: Sequence[Tensor], template: Any) -> Hashable | None:
    """What decides which operators a block runs and which of their results backward needs.

    Args:
        module: the block.
        tensors: those among its arguments.
        template: the rest of its arguments, from ``take_tensors``.

    Returns:
        Equal values for calls that run alike: blocks of the same classes, settings and parameter shapes, with
        the same parameters frozen, on inputs of the same shapes. None for calls that are not followed: of
        tensor subclasses (such as sharded parameters, whose collectives no process may run on its own), or
        with arguments of other types than tensors, numbers and texts.
    """
    parts: list[Hashable] = []
    arguments = describe_template(template)
    if arguments is None or not _add_parts(module, parts) or any(type(t) not in _FOLLOWED for t in tensors):
        return None
    inputs = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)
    devices = {"cpu"} | {tensor.device.type for tensor in tensors}
    autocast = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in sorted(devices)
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    )
    return arguments, inputs, autocast, tuple(parts)


def _add_parts(module: nn.Module, parts: list[Hashable]) -> bool:
    """Append class, settings and parameters of a module and of those in it; False if one is not followed."""
    # This runs in every recompute, so the module's own dictionaries are read: with named_modules and
    # named_parameters it took three times as long.
    parts.append((type(module),))
    for name, value in vars(module).items():
        if type(value) in _PLAIN:
            parts.append((name, value))
        elif type(value) is list:
            # The active adapters of peft's layers.
            parts.append((name, repr(value)))
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if type(parameter) not in _FOLLOWED:
            return False
        parts.append((name, parameter.shape, parameter.dtype, parameter.requires_grad))
    return all(_add_parts(child, parts) for child in module._modules.values() if child is not None)
