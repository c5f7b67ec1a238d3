"""This file links the tensors that one block call parks, and the block calls of one forward pass."""

import itertools
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from diffsynth_lite.core.gradient.parking import ParkedTensor

Place = tuple[int, int]
"""Which block call of a forward pass, and which tensor of the call."""


class Frame:
    """One block call between its forward and its backward; owned by what it parked, in the autograd graph.

    Attributes:
        forward_pass: that the call belongs to.
        num_bytes: of the tensors that could be parked, whether there was room or not.
    """

    def __init__(self, forward_pass: "ForwardPass") -> None:
        self.forward_pass = forward_pass
        self.num_bytes = 0
        self._index: int | None = None
        self._places = itertools.count()
        # Several places of the call may share one.
        self._parked: dict[Any, weakref.ref[ParkedTensor]] = {}

    def next_place(self) -> Place:
        """The place of the next tensor of the call."""
        # A call that never asks is not part of the pass.
        if self._index is None:
            self._index = self.forward_pass.add(self)
        return self._index, next(self._places)

    def before(self, count: int) -> Iterator["Frame"]:
        """The last ``count`` calls before this one that still have a backward pass ahead."""
        return self.forward_pass.before(self._index or 0, count)

    def add(self, key: Any, parked: ParkedTensor) -> None:
        """Remember a tensor that was parked, by its ``identity``."""
        self._parked[key] = weakref.ref(parked)

    def find(self, key: Any) -> ParkedTensor | None:
        """What was parked of the tensor with this ``identity``, while anybody needs it."""
        reference = self._parked.get(key)
        return reference() if reference else None

    def __iter__(self) -> Iterator[ParkedTensor]:
        """What the call parked and somebody still needs."""
        return (parked for reference in self._parked.values() if (parked := reference()) is not None)


class ForwardPass:
    """The block calls since the last backward pass, and which of their tensors are shared by several calls.

    Args:
        shared_before: places of the tensors that later block calls of the previous pass received again.
    """

    def __init__(self, shared_before: frozenset[Place] = frozenset()) -> None:
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
        """Its backward pass begins."""
        self._is_over = True

    def next(self) -> "ForwardPass":
        """The pass after this one, which expects the same tensors to be shared."""
        return ForwardPass(frozenset(self._shared))

    def add(self, frame: Frame) -> int:
        """Append a block call; its index."""
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
    """Equal for tensors that show the same part of the same memory in the same way."""
    storage = tensor.untyped_storage()
    return storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread.

    Raises:
        RuntimeError: this torch does not tell.
    """
    # There is no public function for it (pytorch pull request 141276 was closed). From torch 2.6 to 2.13 its
    # own checkpoint, FSDP2 and module_tracker ask in this way.
    graph_task_id = getattr(torch._C, "_current_graph_task_id", None)
    if graph_task_id is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no torch._C._current_graph_task_id, without which nothing can be "
            "parked; use a torch from 2.6 to 2.13, or set use_gradient_checkpointing_offload off"
        )
    return bool(graph_task_id() != -1)
