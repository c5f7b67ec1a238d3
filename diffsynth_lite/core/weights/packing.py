"""This file packs the frozen weights of a block into one piece of host memory, and lets it find them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffsynth_lite.core.transfer.backends import Backend
from diffsynth_lite.core.units import format_bytes

_ALIGNMENT = 512
"""Bytes; where the allocator of CUDA puts tensors, so that the kernels are those of resident weights."""
_CACHE_LINE = 64

Holder = tuple[nn.Module, str]
"""A module, and the name that it has for a weight."""


def frozen_weights(block: nn.Module, min_bytes: int) -> dict[nn.Parameter, list[Holder]]:
    """The weights of a block that can leave the device, each with all modules that hold it.

    Those that train stay, and so do small ones, tensor subclasses and what has gaps in memory.

    Args:
        block: also one on the meta device.
        min_bytes: smaller ones stay.
    """
    found: dict[nn.Parameter, list[Holder]] = {}
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _can_leave(parameter, min_bytes):
                found.setdefault(parameter, []).append((module, name))
    return found


def packed_bytes(weights: Iterable[nn.Parameter]) -> int:
    """Bytes that these weights take together, with what is left free between them."""
    return sum(_room_for(parameter) for parameter in weights)


class PackedBlock:
    """The frozen weights of one block, packed in host memory.

    They are plain attributes of their modules from then on: nothing that moves, lists, saves or broadcasts
    parameters sees them. Whoever reads one gets what the block was bound to last.

    Args:
        weights: as of ``frozen_weights``; the memory that they had is free afterwards.
        device: that the weights will visit.
        backend: gives the host memory.

    Raises:
        ValueError: the system has no host memory for them.
    """

    def __init__(
        self, weights: dict[nn.Parameter, list[Holder]], device: torch.device, backend: Backend
    ) -> None:
        num_bytes = packed_bytes(weights)
        host = backend.allocate_host(num_bytes)
        if host is None:
            raise ValueError(f"the system refused {format_bytes(num_bytes)} of host memory for one block")
        self.host = host
        self._pieces: list[_Piece] = []
        start = 0
        for parameter, holders in weights.items():
            # On the CPU resident weights stay where they were loaded, and their place in a cache line shows
            # in the last bit of products with a single row.
            shift = parameter.data_ptr() % _CACHE_LINE if device.type == "cpu" else 0
            piece = _Piece.of(parameter, holders, start + shift - shift % parameter.element_size())
            piece.view(host).copy_(parameter.detach())
            self._pieces.append(piece)
            start += _room_for(parameter)
            for module, name in holders:
                del module._parameters[name]
        self.bind(host)

    def bind(self, memory: Tensor) -> None:
        """Let the block find its weights in ``memory``, which holds what ``host`` does, or soon will."""
        for piece in self._pieces:
            tensor = piece.view(memory)
            for module, name in piece.holders:
                vars(module)[name] = tensor


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Where one weight is in the memory of its block."""

    holders: list[Holder]
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @classmethod
    def of(cls, parameter: nn.Parameter, holders: list[Holder], start: int) -> "_Piece":
        return cls(
            holders=holders,
            start=start,
            num_bytes=parameter.nbytes,
            dtype=parameter.dtype,
            shape=parameter.shape,
            strides=parameter.stride(),
        )

    def view(self, memory: Tensor) -> Tensor:
        """The weight in ``memory``, of uint8."""
        values = memory[self.start : self.start + self.num_bytes].view(self.dtype)
        # The strides too: another memory order would choose other kernels, which round differently.
        return values.as_strided(self.shape, self.strides)


def _can_leave(parameter: nn.Parameter, min_bytes: int) -> bool:
    if parameter.requires_grad or type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
        return False
    if parameter.layout is not torch.strided or parameter.nbytes < max(min_bytes, 1):
        return False
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()


def _room_for(parameter: nn.Parameter) -> int:
    return -(-(parameter.nbytes + _CACHE_LINE) // _ALIGNMENT) * _ALIGNMENT
