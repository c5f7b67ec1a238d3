"""This file streams frozen weights: those of chosen blocks live in host memory, and visit the device.

The device has a few slots, each as large as the largest of these blocks. A block call waits for the copy of
its weights into a slot, and starts those of the blocks whose turn is next: the following ones in forward, the
ones before in backward. Nothing is copied back, since nothing changes. A slot is given to another block when
that starts to be copied, which by the contract of backends comes after all that was computed before.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from diffsynth_lite.core.gradient.checkpoint import runs_again
from diffsynth_lite.core.gradient.frames import in_backward
from diffsynth_lite.core.reports import StreamReport
from diffsynth_lite.core.transfer.backends import Backend, Copy, backend_for, smallest_worth_moving
from diffsynth_lite.core.transfer.shared_memory import HostMemory
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights.packing import (
    HostBlocks,
    PackedBlock,
    frozen_weights,
    packed_bytes,
    place_in_line,
)

SLOTS_TO_GENERATE = 2
"""Slots of a model that only generates: one block computes while the next arrives."""

_CopyUnderWay = tuple[Copy, Tensor, Tensor]


def spread_evenly(num_blocks: int, num_streamed: int) -> list[int]:
    """Places of the streamed blocks among all: spread, so that there is the most to compute between two."""
    return [(2 * place + 1) * num_blocks // (2 * num_streamed) for place in range(num_streamed)]


def require_saving(
    models: Sequence[Sequence[nn.Module]],
    device: torch.device,
    *,
    num_slots: int = 2,
    min_bytes: int | None = None,
) -> None:
    """Check that to stream these blocks takes less of the device than to leave their weights there.

    Args:
        models: as of :class:`WeightStream`, and all others; also on the meta device.

    Raises:
        ValueError: it does not.
    """
    min_bytes = smallest_worth_moving(device, min_bytes)
    for blocks in models:
        sizes = [packed_bytes(frozen_weights(block, min_bytes)) for block in blocks]
        num_moving, largest = sum(map(bool, sizes)), max(sizes)
        if not num_moving:
            raise ValueError(
                f"there is nothing to stream in {len(sizes)} blocks: no frozen weight of them has min_bytes, "
                f"{min_bytes}, or more; lower min_bytes"
            )
        if num_moving <= num_slots:
            raise ValueError(
                f"{num_moving} blocks would all stay in {num_slots} slots, and nothing be saved; stream more "
                "blocks, or take fewer slots"
            )
        if sum(sizes) <= num_slots * largest:
            raise ValueError(
                f"the weights of {num_moving} blocks take {format_bytes(sum(sizes))}, and {num_slots} slots "
                f"for the largest {format_bytes(num_slots * largest)}, so that nothing is saved; stream "
                "more blocks, or take fewer slots"
            )


class WeightStream:
    """Keeps the frozen weights of blocks in host memory, and brings them to the device when a block runs.

    It acts innermost, around each block's ``forward``: in forward, recompute and without gradients alike.
    Values and gradients are those of resident weights. What trains stays on the device, as do weights below
    ``min_bytes``. Outside of its runs a block shows the weights in host memory, as plain attributes:
    ``parameters``, ``state_dict`` and ``to`` pass them over.

    A block that is checkpointed must be so by ``gradient_checkpoint_forward``. One that is not keeps its
    activations, and none of the streamed weights: backward gets these from the slot that has them by then.

    Args:
        models: the blocks to stream, of each model in the order in which its forward pass calls them. All
            share the slots. None streams nothing.
        num_slots: blocks on the device at once. With one, each block waits for its copy.
        min_bytes: smaller weights stay on the device. None: 64 KiB on accelerators, 0 on the CPU.
        backend: makes the copies; a gradient engine of the same device should share it, so that inputs and
            weights queue on the same streams. None: that of ``loaded``, or the one that suits the device.
        loaded: blocks that are in host memory already. Weights of others are copied there, only for this
            process.
    """

    def __init__(
        self,
        models: Sequence[Sequence[nn.Module]],
        device: torch.device,
        *,
        num_slots: int = 2,
        min_bytes: int | None = None,
        backend: Backend | None = None,
        loaded: HostBlocks | None = None,
    ) -> None:
        require_saving(models, device, num_slots=num_slots, min_bytes=min_bytes)
        self._blocks: list[PackedBlock] = []
        self._ranges: list[range] = []  # for each block, the places of its model
        if backend is None:
            backend = backend_for(device) if loaded is None else loaded.memory.backend
        self._backend, self._device = backend, device
        self._min_bytes = smallest_worth_moving(device, min_bytes)
        self._num_host_copies = 1 if loaded is None else loaded.memory.num_copies
        self._num_host_processes = 1 if loaded is None else loaded.memory.num_processes
        for blocks in models:
            self._pack(blocks, {} if loaded is None else loaded.packed)
        size = max((block.host.numel() for block in self._blocks), default=0)
        num_slots = num_slots if self._blocks else 0
        self._slots = [_Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(num_slots)]
        self.start_report()
        # Else the first blocks would come late.
        for place in range(num_slots):
            self._start(place, range(num_slots))

    @property
    def backend(self) -> Backend | None:
        """What makes the copies; None where nothing is streamed."""
        return self._backend if self._blocks else None

    @property
    def slot_bytes(self) -> int:
        """Bytes of the device that the slots take."""
        return sum(slot.flat.numel() for slot in self._slots)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are this process's share."""
        return self._bytes_on_machine // self._num_host_processes

    @property
    def _bytes_on_machine(self) -> int:
        return self._num_host_copies * sum(block.host.numel() for block in self._blocks)

    def start_report(self) -> None:
        """Set all counters to zero."""
        self._num_run = self._num_copies = self._num_bytes = self._num_late = 0

    def report(self) -> StreamReport:
        """What is held, and what happened since ``start_report``."""
        return StreamReport(
            blocks_streamed=len(self._blocks),
            weight_bytes_on_host=self._bytes_on_machine,
            weight_copies_on_host=self._num_host_copies,
            processes_on_host=self._num_host_processes,
            weight_bytes_in_slots=self.slot_bytes,
            streamed_blocks_run=self._num_run,
            weight_copies=self._num_copies,
            weight_bytes_copied=self._num_bytes,
            late_weight_copies=self._num_late,
        )

    def _pack(self, blocks: Sequence[nn.Module], loaded: Mapping[nn.Module, PackedBlock]) -> None:
        first = len(self._blocks)
        for block in blocks:
            packed = loaded[block] if block in loaded else self._copied(block)
            if packed is not None:
                packed.take_out()
                self._wrap(block, len(self._blocks))
                self._blocks.append(packed)
        places = range(first, len(self._blocks))
        self._ranges += [places] * len(places)

    def _copied(self, block: nn.Module) -> PackedBlock | None:
        """The block with its weights in host memory of this process; None of one that has none to move."""
        weights = frozen_weights(block, self._min_bytes)
        if not weights:
            return None
        host = HostMemory(self._backend).take(packed_bytes(weights))
        # On the CPU resident weights stay where they were loaded.
        packed = PackedBlock(
            weights, host, place_in_line if self._device.type == "cpu" else lambda _weight: 0
        )
        packed.copy_in()
        return packed

    def _wrap(self, block: nn.Module, place: int) -> None:
        forward = block.forward

        def streamed(_block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._run(place, forward, args, kwargs)

        # A bound method, as it was before: others ask it for its module.
        vars(block)["forward"] = MethodType(streamed, block)

    def _run(
        self, place: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        slot = self._enter(place)
        self._num_run += 1
        if not torch.is_grad_enabled() or runs_again():
            return forward(*args, **kwargs)

        def pack(tensor: Tensor) -> _SavedTensor | _SavedWeight:
            return _SavedWeight(self, place, tensor) if slot.has(tensor) else _SavedTensor(tensor)

        with saved_tensors_hooks(pack, lambda saved: saved.restore()):
            return forward(*args, **kwargs)

    def _enter(self, place: int) -> "_Slot":
        """The slot with the weights of a block; copies of the blocks whose turn is next are started."""
        wanted = self._wanted(place)
        slot = self._slot_of(place)
        if slot is None:
            self._num_late += 1
            slot = self._start(place, wanted)
        if slot.wait():
            self._blocks[place].bind(slot.flat)
        for following in wanted:
            if self._slot_of(following) is None:
                self._start(following, wanted)
        return slot

    def _wanted(self, place: int) -> list[int]:
        """The block at ``place``, and those that run after it, as many as there are slots."""
        own = self._ranges[place]
        following = range(place + 1, own.stop)
        if in_backward():
            following = range(place - 1, own.start - 1, -1)
        # Without gradients, as in a preview, the model mostly runs again.
        again = [] if torch.is_grad_enabled() or in_backward() else range(own.start, place)
        return [place, *islice(chain(following, again), len(self._slots) - 1)]

    def _slot_of(self, place: int) -> "_Slot | None":
        return next((slot for slot in self._slots if slot.place == place), None)

    def _start(self, place: int, wanted: Sequence[int]) -> "_Slot":
        """Start to copy the weights of a block into a slot that no block which is wanted has."""
        slot = next(slot for slot in self._slots if slot.place not in wanted)
        slot.wait()
        if slot.place is not None:
            left = self._blocks[slot.place]
            left.bind(left.host)
        host = self._blocks[place].host
        slot.start(place, host, self._backend)
        self._num_copies += 1
        self._num_bytes += host.numel()
        return slot


class _Slot:
    """Memory of the device that holds the weights of one block at a time, or soon will."""

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat
        self.place: int | None = None
        # At most one copy, with both its tensors. One that is under way at the end is waited for before
        # their memory goes to somebody else; not in __del__: of garbage with cycles, tensors go first.
        self._under_way: list[_CopyUnderWay] = []
        weakref.finalize(self, _wait_for, self._under_way).atexit = False

    def start(self, place: int, host: Tensor, backend: Backend) -> None:
        """Start to copy the weights of a block in; the copy before was waited for."""
        self.place = place
        target = self.flat[: host.numel()]
        self._under_way.append((backend.to_device(target, host), target, host))

    def wait(self) -> bool:
        """Let what is computed from now on come after the copy; whether there was one."""
        was_under_way = bool(self._under_way)
        _wait_for(self._under_way)
        return was_under_way

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight in it, or a view of one."""
        return type(tensor) is Tensor and tensor.untyped_storage().data_ptr() == self.flat.data_ptr()


def _wait_for(under_way: list[_CopyUnderWay]) -> None:
    for copy, _target, _host in under_way:
        copy.wait()
    under_way.clear()


class _SavedWeight:
    """A streamed weight, or a view of it, that backward needs: where it is in the slot of its block."""

    def __init__(self, stream: WeightStream, place: int, tensor: Tensor) -> None:
        self._stream, self._place = stream, place
        self._dtype, self._offset = tensor.dtype, tensor.storage_offset()
        self._shape, self._strides = tensor.shape, tensor.stride()

    def restore(self) -> Tensor:
        """The tensor, in the slot that has it now."""
        flat = self._stream._enter(self._place).flat
        return flat.view(self._dtype).as_strided(self._shape, self._strides, self._offset)


class _SavedTensor:
    """Any other tensor that backward needs."""

    def __init__(self, tensor: Tensor) -> None:
        # Detached, or a saved output would hold its own graph.
        self._tensor, self._version = tensor.detach(), tensor._version

    def restore(self) -> Tensor:
        """The tensor."""
        # Autograd makes this check for the tensors that it saves itself, but not for those that hooks keep.
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._tensor.shape)} that a block saved was changed in place "
                "before its backward pass"
            )
        return self._tensor
