"""This file packs the frozen weights of a block into one piece of host memory, and lets it find them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from diffsynth_lite.core.transfer.shared_memory import HostMemory

_ALIGNMENT = 512
"""Bytes; where the allocator of CUDA puts tensors, so that the kernels are those of resident weights."""
_CACHE_LINE = 64
"""Bytes. On the CPU a weight's place in one shows in the last bit of products with a single row."""

Holder = tuple[nn.Module, str]
"""A module, and the name that it has for a weight."""


def frozen_weights(block: nn.Module, min_bytes: int) -> dict[nn.Parameter, list[Holder]]:
    """The weights of a block that can leave the device, each with all modules that hold it.

    Those that train stay, and so do small ones, tensor subclasses and what has gaps in memory.
    """
    found: dict[nn.Parameter, list[Holder]] = {}
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and _can_leave(parameter, min_bytes):
                found.setdefault(parameter, []).append((module, name))
    return found


def place_in_line(tensor: Tensor) -> int:
    """Where the first byte of a tensor is in a cache line."""
    return tensor.data_ptr() % _CACHE_LINE


def packed_bytes(weights: Iterable[nn.Parameter]) -> int:
    """Bytes that these weights take together, with what is left free between them."""
    return sum(_room_for(parameter) for parameter in weights)


class PackedBlock:
    """The frozen weights of one block, packed in host memory.

    Once they are taken out, they are plain attributes of their modules: nothing that moves, lists, saves or
    broadcasts parameters sees them. Whoever reads one gets what the block was bound to last.

    Args:
        host: of ``packed_bytes``, uint8.
    """

    def __init__(
        self,
        weights: Mapping[nn.Parameter, list[Holder]],
        host: Tensor,
        place_of: Callable[[nn.Parameter], int],
    ) -> None:
        self.host = host
        self._pieces: list[_Piece] = []
        start = 0
        for parameter, holders in weights.items():
            place = place_of(parameter)
            self._pieces.append(
                _Piece(
                    holders=holders,
                    start=start + place - place % parameter.element_size(),
                    num_bytes=parameter.nbytes,
                    dtype=parameter.dtype,
                    shape=parameter.shape,
                    strides=parameter.stride(),
                )
            )
            start += _room_for(parameter)

    def put_in(self) -> Iterator[nn.Parameter]:
        """Give the modules parameters in host memory, in place of those that they have."""
        for piece in self._pieces:
            parameter = nn.Parameter(piece.view(self.host), requires_grad=False)
            for module, name in piece.holders:
                module._parameters[name] = parameter
            yield parameter

    def copy_in(self) -> None:
        """Copy the weights that the modules have into host memory."""
        for piece in self._pieces:
            module, name = piece.holders[0]
            piece.view(self.host).copy_(module.get_parameter(name).detach())

    def take_out(self) -> None:
        """Take the parameters out of their modules; the memory that only they have is free then."""
        for piece in self._pieces:
            for module, name in piece.holders:
                del module._parameters[name]
        self.bind(self.host)

    def bind(self, memory: Tensor) -> None:
        """Let the block find its weights in ``memory``, which holds what ``host`` does, or soon will."""
        for piece in self._pieces:
            tensor = piece.view(memory)
            for module, name in piece.holders:
                vars(module)[name] = tensor


class HostBlocks:
    """Blocks whose weights are loaded to host memory at once, where a stream takes them over.

    Attributes:
        packed: what was loaded, by its block.
    """

    def __init__(
        self,
        blocks_of: Callable[[nn.Module], Sequence[nn.Module]],
        device: torch.device,
        *,
        min_bytes: int,
        memory: HostMemory,
    ) -> None:
        self.device, self.memory = device, memory
        self.packed: dict[nn.Module, PackedBlock] = {}
        self._blocks_of, self._min_bytes = blocks_of, min_bytes

    def make_memory(self, model: nn.Module, place_of: Callable[[nn.Parameter], int]) -> set[nn.Parameter]:
        """Give the model's blocks weights in host memory, which are to be filled, and return these."""
        made: set[nn.Parameter] = set()
        for block in self._blocks_of(model):
            weights = frozen_weights(block, self._min_bytes)
            if weights:
                memory = self.memory.take(packed_bytes(weights))
                self.packed[block] = PackedBlock(weights, memory, place_of)
                made.update(self.packed[block].put_in())
        return made


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Where one weight is in the memory of its block."""

    holders: list[Holder]
    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

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
