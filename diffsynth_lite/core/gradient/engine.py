"""This file holds the engine of block calls, which offloads their tensors, fetches them and counts both."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypedDict
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from diffsynth_lite.core.gradient.blocks import is_compiled
from diffsynth_lite.core.gradient.frames import (
    ForwardPass,
    Frame,
    NotOffloaded,
    OffloadedTensor,
    identity,
    in_backward,
    num_bytes,
    reason_not_to_offload,
)
from diffsynth_lite.core.gradient.policies import BlockPolicy
from diffsynth_lite.core.reports import Counters, GradientReport, NotOffloadedReason
from diffsynth_lite.core.transfer.backends import Backend, backend_for
from diffsynth_lite.core.transfer.host_pool import HostBytesError, HostPool, default_host_bytes


class GradientFlags(TypedDict):
    """The two switches, as every ``model_fn`` takes them."""

    use_gradient_checkpointing: bool
    use_gradient_checkpointing_offload: bool


class GradientEngine:
    """Offloads tensors for the block calls made under it, and counts what happens in them.

    Forward, the tensors of a block call are copied to host memory while the next ones compute, and leave the
    device ``resident_blocks`` calls later. Backward, each call fetches those of the ``prefetched_blocks``
    calls that come next. Tensors that several block calls receive stay on the device.

    Args:
        min_bytes: tensors smaller than this stay on the device. None: 64 KiB on accelerators, 0 on CPU.
        host_bytes: most host memory to use. None: half of what is available when the first tensor is
            offloaded, divided by the processes that share it. What does not fit stays on the device.
        resident_blocks: block calls, the last ones, whose tensors are still on the device.
        prefetched_blocks: block calls whose tensors are fetched ahead in backward.
        policy: what happens to the single blocks, as far as the switches of their calls permit it. None:
            every block by its flags.
        skip_dead_ops: leave out of the recompute the matrix products whose results no gradient needs, in the
            layers that the model family names.
        use_gradient_checkpointing: recompute the blocks of a model family's ``predict``. A block called with
            switches of its own follows these.

    Attributes:
        state: read when a block is checkpointed and when it is recomputed, as what the block computes depends
            on it without being among its inputs; such as the strength of an adapter.
    """

    def __init__(
        self,
        min_bytes: int | None = None,
        host_bytes: int | None = None,
        resident_blocks: int = 1,
        prefetched_blocks: int = 1,
        backend: Backend | None = None,
        *,
        policy: BlockPolicy | None = None,
        skip_dead_ops: bool = True,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
    ) -> None:
        values = {
            "min_bytes": min_bytes,
            "host_bytes": host_bytes,
            "resident_blocks": resident_blocks,
            "prefetched_blocks": prefetched_blocks,
        }
        for name, value in values.items():
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 or more")
        self.policy = policy or BlockPolicy()
        self.skip_dead_ops = skip_dead_ops
        self.flags = GradientFlags(
            use_gradient_checkpointing=use_gradient_checkpointing,
            use_gradient_checkpointing_offload=use_gradient_checkpointing_offload,
        )
        self.needed_matmuls: WeakSet[nn.Module] = WeakSet()
        self.state: Callable[[], object] = lambda: None
        self._not_compiled: WeakSet[nn.Module] = WeakSet()
        self._min_bytes, self._host_bytes = min_bytes, host_bytes
        self._prefetched_blocks = prefetched_blocks
        # The autograd graph owns frames and offloaded tensors: what it drops is gone, whatever the reason.
        self._resident: deque[ref[Frame]] = deque()
        self._resident_blocks = resident_blocks
        self._pass = ForwardPass()
        self._backend = backend
        self._backends: dict[torch.device, Backend] = {}
        self._pool: HostPool | None = None
        self._counters = Counters()
        self._has_run_backward = False
        # Backward passes begin on autograd's worker threads.
        self._lock = threading.Lock()

    @property
    def host_pool(self) -> HostPool:
        """The host memory that tensors are offloaded to."""
        # Not before the first tensor: the memory of the models is taken by then.
        if self._pool is None:
            self._pool = HostPool(default_host_bytes() if self._host_bytes is None else self._host_bytes)
        return self._pool

    def start_report(self) -> None:
        """Set all counters to zero."""
        self._counters.reset()

    def report(self) -> GradientReport:
        """What happened since ``start_report``."""
        pool = self._pool
        return self._counters.report(
            host_bytes=pool.num_bytes if pool else 0,
            host_bytes_cap=(pool.cap_bytes or 0) if pool else 0,
            device_bytes_peak=torch.cuda.max_memory_allocated() if _uses_cuda() else 0,
        )

    def count(self, **increments: int) -> None:
        """Add to counters, named as the fields of ``GradientReport``."""
        self._counters.add(**increments)

    def is_compiled(self, block: nn.Module) -> bool:
        """Whether a block or a part of it is compiled; parts are looked at when it is first asked for."""
        # With all its parts it took longer than everything else that is done for a block.
        if block in self._not_compiled:
            return block._compiled_call_impl is not None
        if is_compiled(block):
            return True
        self._not_compiled.add(block)
        return False

    def can_offload(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` can go to host memory; if not, it is counted with the reason."""
        reason = self._reason_not_to_offload(tensor)
        if reason is not None:
            self._counters.add_not_offloaded(reason, num_bytes(tensor))
        return reason is None

    @contextmanager
    def frame(self) -> Iterator["OffloadContext"]:
        """Scope of one block call in its forward pass.

        Raises:
            HostBytesError: at its end, when the host memory allowed does not even hold what this call
                offloads; not any more once a backward pass has begun, since later batches may be larger.
        """
        with self._lock:
            if self._pass.is_over:
                self._pass = self._pass.next()
            frame = Frame(self._pass)
        context = OffloadContext(self, frame)
        token = _context.set(context)
        try:
            yield context
        finally:
            _context.reset(token)
            self._counters.raise_to(largest_block_bytes=frame.num_bytes)
            self._make_room_for(frame)
        cap_bytes = self._pool.cap_bytes if self._pool else None
        if cap_bytes is not None and frame.num_bytes > cap_bytes and not self._has_run_backward:
            raise HostBytesError(cap_bytes, frame.num_bytes)

    def offload(self, tensor: Tensor) -> "OffloadHandle":
        """Offload any tensor with those of the block call that is running its forward pass.

        Whoever keeps the result keeps the values; keep it in the autograd graph only.
        """
        context = _context.get()
        if context is None or context.engine is not self:
            raise RuntimeError("a tensor can only be offloaded in the forward pass of a block of this engine")
        if not self.can_offload(tensor):
            return OffloadHandle(context, NotOffloaded(tensor))
        return context.offload(tensor)

    def save_attention(self, tensor: Tensor, *, offload: bool) -> Callable[[], Tensor]:
        """Save a tensor that attention computed in the running block call until its recompute.

        Args:
            offload: save it in host memory if it can go there. If not, it stays on the device.

        Returns:
            A function that gives it back, as a new tensor each time.
        """
        if offload and self._reason_not_to_offload(tensor) is None:
            offloaded = self.offload(tensor)
            if offloaded.is_in_host_memory:
                self.count(attention_bytes_offloaded=num_bytes(tensor))
                return offloaded.restore
        self.count(attention_bytes_kept=num_bytes(tensor))
        return tensor.detach

    def recomputing(self, state: object) -> None:
        """Count that a block runs again; the backward pass has begun.

        Args:
            state: :attr:`state` in its forward pass.

        Raises:
            RuntimeError: it has changed: the gradient would be that of another function.
        """
        if self.state() != state:
            raise RuntimeError(
                f"the strength of an adapter was {state} in the forward pass of a checkpointed block and is "
                f"{self.state()} in its recompute; run backward before the strength changes"
            )
        self.count(blocks_recomputed=1)
        self._end_forward()

    def offload_in(self, frame: Frame, tensor: Tensor) -> OffloadedTensor | NotOffloaded:
        """Offload a tensor, or keep it where it is if it is shared or there is no room."""
        size = num_bytes(tensor)
        if frame.forward_pass.is_shared(tensor, frame.next_place()):
            self.count(tensors_shared=1, bytes_shared=size)
            return NotOffloaded(tensor)
        key = identity(tensor)
        if (offloaded := frame.find(key)) is not None:
            return offloaded
        frame.num_bytes += size
        backend = self._backend_for(tensor.device)
        piece = self.host_pool.take(size, backend.allocate_host)
        if piece is None:
            refused = self.host_pool.refused
            self._counters.add_not_offloaded(
                NotOffloadedReason.REFUSED if refused else NotOffloadedReason.HOST_FULL, size
            )
            return NotOffloaded(tensor)
        offloaded = OffloadedTensor(tensor, piece, backend)
        frame.add(key, offloaded)
        self.count(tensors_offloaded=1, bytes_offloaded=size)
        return offloaded

    def restore_in(self, frame: Frame, held: OffloadedTensor | NotOffloaded) -> Tensor:
        """Give a tensor back to its block call, and fetch those of the calls whose turn is next."""
        self._end_forward()
        if isinstance(held, OffloadedTensor) and not held.is_on_device:
            self.count(late_prefetches=1)
        tensor = held.restore()
        if frame.begins_to_restore():
            for earlier in frame.before(self._prefetched_blocks):
                for offloaded in earlier:
                    offloaded.fetch()
        return tensor

    def _make_room_for(self, frame: Frame) -> None:
        """Let the tensors of the oldest resident call leave the device."""
        if any(frame):
            self._resident.append(ref(frame))
        while len(self._resident) > self._resident_blocks:
            oldest = self._resident.popleft()()
            for offloaded in oldest or ():
                offloaded.leave_device()

    def _end_forward(self) -> None:
        with self._lock:
            if self._pass.is_over:
                return
            self._pass.end()
        self._has_run_backward = True
        if _uses_cuda():
            self._counters.put(device_bytes_after_forward=torch.cuda.memory_allocated())

    def _backend_for(self, device: torch.device) -> Backend:
        if self._backend is not None:
            return self._backend
        if device not in self._backends:
            self._backends[device] = backend_for(device)
        return self._backends[device]

    def _reason_not_to_offload(self, tensor: Tensor) -> NotOffloadedReason | None:
        reason = reason_not_to_offload(tensor, self._min_bytes)
        # A block inside of a recomputed block: its backward pass comes at once.
        return NotOffloadedReason.IN_BACKWARD if reason is None and in_backward() else reason


class OffloadContext:
    """Offloads the tensors of one block call."""

    def __init__(self, engine: GradientEngine, frame: Frame) -> None:
        self.engine, self.frame = engine, frame

    def offload(self, tensor: Tensor) -> "OffloadHandle":
        """Offload a tensor for which ``engine.can_offload``."""
        return OffloadHandle(self, self.engine.offload_in(self.frame, tensor))

    def of_saved_tensors(self) -> saved_tensors_hooks:
        """Scope in which every tensor saved for backward is offloaded until backward asks for it."""

        def pack(tensor: Tensor) -> OffloadHandle:
            # Before torch 2.12 checkpoint saves an empty tensor of its own with the inputs.
            return self.offload(tensor) if tensor.numel() else OffloadHandle(self, NotOffloaded(tensor))

        return saved_tensors_hooks(pack, OffloadHandle.restore)


class OffloadHandle:
    """A tensor of a block call that is offloaded, or could not be, until its backward pass asks for it."""

    __slots__ = ("_context", "_held")

    def __init__(self, context: OffloadContext, held: OffloadedTensor | NotOffloaded) -> None:
        self._context, self._held = context, held

    @property
    def is_in_host_memory(self) -> bool:
        """Whether it has a copy there; a tensor that stays on the device has none."""
        return isinstance(self._held, OffloadedTensor)

    def restore(self) -> Tensor:
        """The tensor, without history; any number of times, on any thread."""
        return self._context.engine.restore_in(self._context.frame, self._held)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


_context: ContextVar[OffloadContext | None] = ContextVar("offload_context", default=None)
