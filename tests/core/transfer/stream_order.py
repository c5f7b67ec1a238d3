"""Shows on the CPU whether the streams of a GPU would order all that shares memory.

The streams are pretended, and what is given to them runs at once. But each knows what of the others it has
waited for. So two accesses to the same memory, one of them a write, are found where nothing orders them: a
GPU may do them in any order. The same goes for memory that is given back, since the allocator hands it to
what is computed next. And what is computed with host memory is found, which a GPU refuses.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from diffsynth_lite.core.gradient.arguments import take_tensors
from diffsynth_lite.core.transfer.backends import CudaBackend


class UnorderedError(AssertionError):
    """A GPU might do one thing before the other."""


class OnHostError(AssertionError):
    """A GPU would compute with host memory."""


class Stream:
    """Operations in their order; each is known by its number.

    Attributes:
        waited_for: for each other stream, how many of its operations are over before any further one of this.
    """

    def __init__(self, order: "StreamOrder", device: torch.device) -> None:
        self.device, self.num_operations = device, 0
        self.waited_for: dict[Stream, int] = {}
        self._order = order

    def record_event(self) -> dict["Stream", int]:
        return self.waited_for | {self: self.num_operations}

    def wait_event(self, event: dict["Stream", int]) -> None:
        self._order.look_for_freed()
        for stream, number in event.items():
            self.waited_for[stream] = max(number, self.waited_for.get(stream, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def comes_after(self, stream: "Stream", number: int) -> bool:
        return stream is self or self.waited_for.get(stream, 0) >= number


@dataclass
class _Memory:
    """A piece of memory, and the last access of each kind: (stream, is_write, start, end) to its number.

    Attributes:
        pool: the stream that may get it next; None for host memory, which waits for all copies.
    """

    reference: StorageWeakRef
    pool: Stream | None
    accesses: dict[tuple[Stream, bool, int, int], int] = field(default_factory=dict)


class StreamOrder(TorchDispatchMode):
    """Scope that looks at each operation.

    Attributes:
        compute: the stream that all computation is on.
        current: the stream that operations are given to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.current = Stream(self, torch.device("cpu"))
        self._memory: dict[int, _Memory] = {}

    def host_memory(self, num_bytes: int) -> Tensor:
        """Memory that copies are fast from and to."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._memory_of(memory).pool = None
        return memory

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """Scope in which operations are given to a stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def look_for_freed(self) -> None:
        """Check that no copy is under way from or to memory that was given back."""
        gone = [key for key, memory in self._memory.items() if memory.reference.expired()]
        for key in gone:
            memory = self._memory.pop(key)
            for (stream, *_), number in memory.accesses.items():
                if memory.pool is not None and not memory.pool.comes_after(stream, number):
                    raise UnorderedError("memory was given back that a copy may still need")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.look_for_freed()
        outputs = func(*args, **(kwargs or {}))
        returned = [value.alias_info for value in func._schema.returns]
        if returned and all(alias is not None and not alias.is_write for alias in returned):
            return outputs  # A view reads nothing.
        self.current.num_operations += 1
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written += [(kwargs or {}).get("out")]
        inputs = take_tensors((args, kwargs))[0]
        if func is not torch.ops.aten.copy_.default and any(map(self._is_on_host, inputs)):
            raise OnHostError(f"{func.name()} is asked to compute with host memory")
        changed = {id(tensor) for tensor in take_tensors(written)[0]}
        for tensor in inputs:
            self._access(tensor, is_write=id(tensor) in changed)
        present = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in take_tensors(outputs)[0]:
            if tensor.untyped_storage()._cdata not in present:
                self._access(tensor, is_write=True)
        return outputs

    def _access(self, tensor: Tensor, *, is_write: bool) -> None:
        if not tensor.numel() or tensor.is_meta:
            return
        start = tensor.storage_offset() * tensor.itemsize
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (last + 1) * tensor.itemsize
        accesses = self._memory_of(tensor).accesses
        for (stream, wrote, other_start, other_end), number in accesses.items():
            overlap = start < other_end and other_start < end
            if overlap and (is_write or wrote) and not self.current.comes_after(stream, number):
                raise UnorderedError(
                    f"{'a write' if is_write else 'a read'} of {tuple(tensor.shape)} may come before "
                    f"{'a write' if wrote else 'a read'} on another stream"
                )
        accesses[self.current, is_write, start, end] = self.current.num_operations

    def _is_on_host(self, tensor: Tensor) -> bool:
        return self._memory_of(tensor).pool is None

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memory:
            # The weak reference keeps another storage from getting this identity.
            self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), self.current)
        return self._memory[storage._cdata]


@contextmanager
def stream_order() -> Iterator[tuple[StreamOrder, CudaBackend]]:
    """Scope with the streams of a pretended GPU, and the CUDA backend on them."""
    order = StreamOrder()

    class Backend(CudaBackend):
        def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor:
            return order.host_memory(num_bytes)

    with pytest.MonkeyPatch.context() as patch, order:
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(order, device))
        patch.setattr(torch.cuda, "current_stream", lambda _device: order.current)
        patch.setattr(torch.cuda, "stream", order.on)
        yield order, Backend(torch.device("cpu"))
        order.look_for_freed()
