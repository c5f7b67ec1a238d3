"""This file counts what happens in block calls, on whatever thread."""

import threading
from collections import Counter

from diffsynth_lite.core.gradient.parking import LeaveReason
from diffsynth_lite.core.gradient.report import GradientReport, LeftTensors


class Counters:
    """The numbers of a ``GradientReport`` while they grow, by the names of its fields."""

    def __init__(self) -> None:
        # Recomputes are counted on autograd's worker threads.
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Set everything to zero."""
        with self._lock:
            self._numbers: Counter[str] = Counter()
            self._left: dict[LeaveReason, LeftTensors] = {}

    def add(self, **increments: int) -> None:
        """Add to numbers."""
        with self._lock:
            self._numbers.update(increments)

    def put(self, **values: int) -> None:
        """Replace numbers."""
        with self._lock:
            for name, value in values.items():
                self._numbers[name] = value

    def raise_to(self, **values: int) -> None:
        """Replace the numbers that are smaller."""
        with self._lock:
            for name, value in values.items():
                self._numbers[name] = max(self._numbers[name], value)

    def add_left(self, reason: LeaveReason, num_bytes: int) -> None:
        """Count a tensor that stays on the device."""
        with self._lock:
            left = self._left.get(reason, LeftTensors())
            self._left[reason] = LeftTensors(
                num_tensors=left.num_tensors + 1,
                num_bytes=left.num_bytes + num_bytes,
                largest_bytes=max(left.largest_bytes, num_bytes),
            )

    def report(self, **others: int) -> GradientReport:
        """The numbers as they are, with ``others`` that are not counted."""
        with self._lock:
            return GradientReport(**self._numbers, **others, left=dict(self._left))
