"""This file holds what the checkpointed block calls of a run share: policy, parking threshold, report."""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from diffsynth_lite.core.gradient.parking import LeaveReason, ParkedTensor, num_bytes, reason_to_leave
from diffsynth_lite.core.gradient.policies import BlockPolicy
from diffsynth_lite.core.gradient.report import GradientReport, LeftTensors


class GradientEngine:
    """Parks tensors for the block calls made under it, and counts what happens in them.

    Args:
        min_bytes: tensors smaller than this stay on the device. None: 64 KiB on accelerators, 0 on CPU.
        policy: what happens to the single blocks, as far as the switches of their calls permit it. None:
            every block as its switches say.
        skip_dead_ops: leave out of the recompute the matrix products on which no gradient depends.

    Raises:
        ValueError: ``min_bytes`` is negative.
    """

    def __init__(
        self,
        min_bytes: int | None = None,
        *,
        policy: BlockPolicy | None = None,
        skip_dead_ops: bool = True,
    ) -> None:
        if min_bytes is not None and min_bytes < 0:
            raise ValueError(f"min_bytes is {min_bytes}; it must be 0 or more")
        self.policy = policy or BlockPolicy()
        self.skip_dead_ops = skip_dead_ops
        self._min_bytes = min_bytes
        self._findings: dict[Hashable, Any] = {}
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

    def park(self, tensor: Tensor) -> ParkedTensor:
        """A copy of ``tensor`` in host memory."""
        return ParkedTensor(tensor)

    def parking(self) -> saved_tensors_hooks:
        """Scope in which every tensor saved for backward is parked until backward asks for it."""

        def park(tensor: Tensor) -> ParkedTensor:
            parked = self.park(tensor)
            # Before torch 2.12 checkpoint saves an empty tensor of its own with the inputs.
            if parked.num_bytes:
                self.count(tensors_parked=1, bytes_parked=parked.num_bytes)
            return parked

        return saved_tensors_hooks(park, ParkedTensor.restore)

    def save_attention(self, tensor: Tensor, *, park: bool) -> Callable[[], Tensor]:
        """Put a tensor that attention computed away until the recompute.

        Args:
            tensor: without autograd history.
            park: in host memory, if it is large enough to be parked; if not, on the device.

        Returns:
            A function that gives it as a new tensor each time.
        """
        if park and reason_to_leave(tensor, self._min_bytes) is None:
            parked = self.park(tensor)
            self.count(attention_bytes_parked=parked.num_bytes)
            return parked.restore
        self.count(attention_bytes_kept=num_bytes(tensor))
        return tensor.detach

    def remembered(self, key: Hashable, find: Callable[[], Any]) -> Any:
        """What ``find`` found when it was first asked for ``key``."""
        if key not in self._findings:
            self._findings[key] = find()
        return self._findings[key]


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
    """The engine of the innermost ``gradient_engine`` scope; outside of any, a new one.

    A new one skips no dead operations, because it forgets them: finding them takes longer than running them.
    """
    return _engine.get() or GradientEngine(skip_dead_ops=False)
