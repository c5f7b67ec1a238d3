"""An adversary of the engine: every copy runs as late as it may, on two streams simulated on the CPU."""

import weakref
from collections import deque

import torch
from torch import Tensor

from diffsynth_lite.core.transfer.backends import PlainBackend

GARBAGE = 0xFF  # NaN in every floating-point dtype, -1 in signed integers


class HazardError(AssertionError):
    """Memory that a copy still needed was given away."""


class LazyBackend:
    """Copies that run only when somebody waits for them, each direction in its own order.

    Until then a destination on the device is garbage. Tensors are held weakly, as memory is on a device: when
    one is gone before its copy ran, that is a ``HazardError``.

    Args:
        newest_first: copies of a direction run in the opposite order, as a backend may do with those that
            nobody has waited for.
        forgets: copies in this direction ("out", "in") do not run when they are waited for: the bug of an
            engine that forgets to wait.
        host_bytes: host memory that can be had; None is unlimited.
    """

    def __init__(
        self, *, newest_first: bool = False, forgets: str | None = None, host_bytes: int | None = None
    ) -> None:
        self.pending: dict[str, deque[LazyCopy]] = {"out": deque(), "in": deque()}
        self.newest_first, self.forgets = newest_first, forgets
        self._host_bytes = host_bytes

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        if descriptor != -1:
            return PlainBackend().allocate_host(num_bytes, descriptor)
        if self._host_bytes is not None:
            if num_bytes > self._host_bytes:
                return None
            self._host_bytes -= num_bytes
        return torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)

    def to_host(self, host: Tensor, tensor: Tensor) -> "LazyCopy":
        return self._start("out", host, tensor)

    def to_device(self, tensor: Tensor, host: Tensor) -> "LazyCopy":
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        raw.fill_(GARBAGE)
        return self._start("in", tensor, host)

    def _start(self, direction: str, target: Tensor, source: Tensor) -> "LazyCopy":
        copy = LazyCopy(self, direction, target, source)
        self.pending[direction].append(copy)
        return copy

    @property
    def num_pending(self) -> int:
        return sum(len(copies) for copies in self.pending.values())

    def run(self, copy: "LazyCopy") -> None:
        """Run ``copy`` and those whose turn in its direction is before it."""
        copies = self.pending[copy.direction]
        while copy in copies:
            (copies.pop() if self.newest_first else copies.popleft()).run()

    def finish(self) -> None:
        """Run all that was never waited for."""
        for copies in self.pending.values():
            while copies:
                copies.popleft().run()


class LazyCopy:
    """A copy in a queue."""

    def __init__(self, backend: LazyBackend, direction: str, target: Tensor, source: Tensor) -> None:
        self.direction = direction
        self._backend = backend
        self._target, self._source = weakref.ref(target), weakref.ref(source)

    def wait(self) -> None:
        if self.direction != self._backend.forgets:
            self._backend.run(self)

    def run(self) -> None:
        target, source = self._target(), self._source()
        if target is None or source is None:
            raise HazardError(f"memory was given away before its copy ({self.direction}) had run")
        target.copy_(source)
