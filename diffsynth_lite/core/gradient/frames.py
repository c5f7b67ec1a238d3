"""This file holds offloaded tensors, and links the block calls of a forward pass that they belong to."""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from diffsynth_lite.core.reports import NotOffloadedReason
from diffsynth_lite.core.transfer.backends import Backend, Copy, smallest_worth_moving
from diffsynth_lite.core.transfer.host_pool import HostPiece


def reason_not_to_offload(tensor: Tensor, min_bytes: int | None) -> NotOffloadedReason | None:
    """Why ``tensor`` should stay on its device, or None if it can be offloaded.

    Args:
        min_bytes: smaller tensors stay, and empty ones always. None: what suits the device.
    """
    if isinstance(tensor, torch.nn.Parameter):
        return NotOffloadedReason.PARAMETER
    if type(tensor) is not Tensor:
        return NotOffloadedReason.SUBCLASS
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return NotOffloadedReason.LAYOUT
    if num_bytes(tensor) < max(smallest_worth_moving(tensor.device, min_bytes), 1):
        return NotOffloadedReason.BELOW_MIN_BYTES
    strides = tensor.stride()
    if 0 in strides and any(size > 1 and not step for size, step in zip(tensor.shape, strides, strict=True)):
        return NotOffloadedReason.EXPANDED
    return None


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of ``tensor``; unlike ``nbytes`` it is defined for sparse tensors too."""
    return tensor.numel() * tensor.element_size()


def changed_in_place(shape: torch.Size) -> RuntimeError:
    """The error for an input that no longer is what the forward pass saw."""
    # Autograd makes this check for the tensors that it saves itself, but not for those that hooks keep.
    return RuntimeError(
        f"an input of a checkpointed block, a tensor of shape {tuple(shape)}, was changed in place before "
        "its backward pass"
    )


class NotOffloaded:
    """A tensor that stays on its device; its autograd history is not kept."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def restore(self) -> Tensor:
        """The tensor."""
        if self._tensor._version != self._version:
            raise changed_in_place(self._tensor.shape)
        return self._tensor.detach()


class OffloadedTensor:
    """A tensor whose values are copied to host memory, so that it can leave its device and come back."""

    def __init__(self, tensor: Tensor, piece: HostPiece, backend: Backend) -> None:
        self._copy: Copy | None = None
        self._piece, self._backend = piece, backend
        self._shape, self._strides, self._device = tensor.shape, tensor.stride(), tensor.device
        # The strides of a dense tensor; another one is copied without its gaps.
        self._dense_strides = self._strides
        if not tensor.is_contiguous():
            self._dense_strides = torch.empty_like(tensor, device="meta", requires_grad=False).stride()
        host = piece.buffer.view(tensor.dtype).as_strided(self._shape, self._dense_strides)
        self._original: Tensor | None = tensor.detach()
        self._version, self._is_changed = tensor._version, False
        self._source: Tensor | None = self._original
        if self._dense_strides != self._strides:
            self._source = self._original.clone()
        self._host = host
        self._arriving: Tensor | None = None
        self._copy = backend.to_host(host, self._source)

    def __del__(self) -> None:
        # Before the memory on both sides goes to somebody else.
        if self._copy is not None:
            self._copy.wait()

    @property
    def is_on_device(self) -> bool:
        """Whether ``restore`` can give the tensor without starting a copy."""
        return self._original is not None or self._arriving is not None

    def leave_device(self) -> None:
        """Let go of the original, once its copy is complete."""
        if self._original is None:
            return
        self._wait()
        # The copy may have read the new values. That is an error if backward asks for them, not before.
        self._is_changed = self._original._version != self._version
        self._original = self._source = None

    def fetch(self) -> None:
        """Start to copy the values back, unless they are on the device or on their way."""
        if self.is_on_device:
            return
        # Allocated on the compute stream, where it is used and freed.
        arriving = torch.empty_strided(
            self._shape, self._dense_strides, dtype=self._host.dtype, device=self._device
        )
        self._copy = self._backend.to_device(arriving, self._host)
        self._arriving = arriving

    def restore(self) -> Tensor:
        """A tensor of the same values, shape, strides, dtype and device; the original while it is there."""
        if self._is_changed or (self._original is not None and self._original._version != self._version):
            raise changed_in_place(self._shape)
        if self._original is not None:
            return self._original.detach()
        self.fetch()
        self._wait()
        assert self._arriving is not None
        restored, self._arriving = self._arriving, None
        if self._strides == self._dense_strides:
            return restored
        # The strides too: another memory order would choose other kernels, which round differently.
        gapped = torch.empty_strided(self._shape, self._strides, dtype=self._host.dtype, device=self._device)
        return gapped.copy_(restored)

    def _wait(self) -> None:
        assert self._copy is not None
        self._copy.wait()


Place = tuple[int, int]
"""Which block call of a forward pass, and which tensor of the call."""


class Frame:
    """One block call between its forward and its backward pass.

    Only the autograd graph keeps it alive, by the handles of its tensors.

    Attributes:
        num_bytes: size of its tensors that can be offloaded, whether there was room for them or not.
    """

    def __init__(self, forward_pass: "ForwardPass") -> None:
        self.forward_pass = forward_pass
        self.num_bytes = 0
        self._index: int | None = None
        self._places = itertools.count()
        # Several places of the call may share one.
        self._offloaded: dict[Any, weakref.ref[OffloadedTensor]] = {}

    def next_place(self) -> Place:
        """The place of the next tensor of the call."""
        # A call that never asks is not part of the pass.
        if self._index is None:
            self._index = self.forward_pass.add(self)
        return self._index, next(self._places)

    def begins_to_restore(self) -> bool:
        """Whether the last tensor that was given back in this pass was of another call."""
        before, self.forward_pass.restored_index = self.forward_pass.restored_index, self._index
        return before != self._index

    def before(self, count: int) -> Iterator["Frame"]:
        """The last ``count`` calls before this one that still have a backward pass ahead."""
        return self.forward_pass.before(self._index or 0, count)

    def add(self, key: Any, offloaded: OffloadedTensor) -> None:
        """Remember an offloaded tensor by its ``identity``."""
        self._offloaded[key] = weakref.ref(offloaded)

    def find(self, key: Any) -> OffloadedTensor | None:
        """What was offloaded of the tensor with this ``identity``, while anybody needs it."""
        reference = self._offloaded.get(key)
        return reference() if reference else None

    def __iter__(self) -> Iterator[OffloadedTensor]:
        """What the call offloaded and somebody still needs."""
        return (offloaded for reference in self._offloaded.values() if (offloaded := reference()) is not None)


class ForwardPass:
    """The block calls since the last backward pass, and which of their tensors are shared by several calls.

    Args:
        shared_before: places of the tensors that later block calls of the previous pass received again.
    """

    def __init__(self, shared_before: frozenset[Place] = frozenset()) -> None:
        self.restored_index: int | None = None
        self._is_over = False
        self._shared_before = shared_before
        self._shared: set[Place] = set()
        self._frames: list[weakref.ref[Frame]] = []
        self._seen: dict[Any, _Seen] = {}

    @property
    def is_over(self) -> bool:
        """Whether its backward pass has begun, or will never be."""
        if self._is_over or not self._frames:
            return self._is_over
        return all(reference() is None for reference in self._frames)

    def end(self) -> None:
        """Mark that its backward pass has begun."""
        self._is_over = True

    def next(self) -> "ForwardPass":
        """The pass after this one, which expects the same tensors to be shared."""
        return ForwardPass(frozenset(self._shared))

    def add(self, frame: Frame) -> int:
        """Append a block call, and return its index."""
        self._frames.append(weakref.ref(frame))
        return len(self._frames) - 1

    def before(self, index: int, count: int) -> Iterator[Frame]:
        """The last ``count`` calls before the one at ``index`` that still have a backward pass ahead."""
        alive = (frame for reference in reversed(self._frames[:index]) if (frame := reference()) is not None)
        return itertools.islice(alive, count)

    def is_shared(self, tensor: Tensor, place: Place) -> bool:
        """Whether another block call received the same tensor, or will if this pass is like the last one."""
        key = identity(tensor)
        if key not in self._seen:
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._seen[key] = _Seen(storage, place)
        first = self._seen[key].place
        if first[0] != place[0]:
            self._shared.add(first)
            return True
        return first in self._shared_before


class _Seen(NamedTuple):
    """A tensor that a block call received, and where it was first.

    The weak reference frees the memory but keeps torch from giving another storage the same identity.
    """

    storage: StorageWeakRef
    place: Place


def identity(tensor: Tensor) -> Any:
    """A key that is equal for tensors that show the same part of the same memory in the same way."""
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    # There is no public function for it (pytorch pull request 141276 was closed). From torch 2.6 to 2.13 its
    # own checkpoint, FSDP2 and module_tracker ask in this way.
    graph_task_id = getattr(torch._C, "_current_graph_task_id", None)
    if graph_task_id is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch._C._current_graph_task_id, without which nothing can be "
            "offloaded; use a torch from 2.6 to 2.13, or set use_gradient_checkpointing_offload off"
        )
    return bool(graph_task_id() != -1)
