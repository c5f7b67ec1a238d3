"""This file holds what the checkpointed block calls of a run share: the parking threshold and the report."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from diffsynth_lite.core.gradient.parking import LeaveReason, ParkedTensor, num_bytes, reason_to_leave
from diffsynth_lite.core.gradient.report import GradientReport, LeftTensors


class GradientEngine:
    """Parks tensors for the block calls made under it, and counts what happens in them.

    Args:
        min_bytes: tensors smaller than this stay on the device. None: 64 KiB on accelerators, 0 on CPU.

    Raises:
        ValueError: ``min_bytes`` is negative.
    """

    def __init__(self, min_bytes: int | None = None) -> None:
        if min_bytes is not None and min_bytes < 0:
            raise ValueError(f"min_bytes is {min_bytes}; it must be 0 or more")
        self._min_bytes = min_bytes
        # Recomputes are counted on autograd's worker threads.
        self._lock = threading.Lock()
        self.start_report()

    def start_report(self) -> None:
        """Set all counters to zero."""
        with self._lock:
            self._counts: Counter[str] = Counter()
            self._left: dict[LeaveReason, LeftTensors] = {}

    def report(self) -> GradientReport:
        """What happened since ``start_report``."""
        with self._lock:
            return GradientReport(**self._counts, left=dict(self._left))

    def count(self, **increments: int) -> None:
        """Add to counters, named as the fields of ``GradientReport``."""
        with self._lock:
            self._counts.update(increments)

    def parks(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` goes to host memory; if not, it is counted with the reason."""
        reason = reason_to_leave(tensor, self._min_bytes)
        if reason is None:
            return True
        with self._lock:
            left = self._left.get(reason, LeftTensors())
            self._left[reason] = LeftTensors(
                num_tensors=left.num_tensors + 1,
                num_bytes=left.num_bytes + num_bytes(tensor),
                largest_bytes=max(left.largest_bytes, num_bytes(tensor)),
            )
        return False

    def parking(self) -> saved_tensors_hooks:
        """Scope in which every tensor saved for backward is parked until backward asks for it."""

        def park(tensor: Tensor) -> ParkedTensor:
            parked = ParkedTensor(tensor)
            # Before torch 2.12 checkpoint saves an empty tensor of its own with the inputs.
            if parked.num_bytes:
                self.count(tensors_parked=1, bytes_parked=parked.num_bytes)
            return parked

        return saved_tensors_hooks(park, ParkedTensor.restore)


_engine: ContextVar[GradientEngine | None] = ContextVar("gradient_engine", default=None)


@contextmanager
def gradient_engine(engine: GradientEngine) -> Iterator[None]:
    """Scope in which ``gradient_checkpoint_forward`` works through ``engine``."""
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)


def current_engine() -> GradientEngine:
    """The engine of the innermost ``gradient_engine`` scope; outside of any, a new one with defaults."""
    return _engine.get() or GradientEngine()
