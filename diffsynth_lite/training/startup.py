"""This file measures where the time goes until the first step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StartupClock:
    """Seconds spent in the named stages of a start.

    Args:
        started_at: ``time.perf_counter()`` at the start of the program.
    """

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside the block to a stage."""
        entered_at = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - entered_at)

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere to a stage."""
        self._stages[name] = self._stages.get(name, 0.0) + seconds

    def describe(self) -> str:
        """All stages so far as one line, and what lies between them."""
        total = time.perf_counter() - self._started_at
        stages = {**self._stages, "other": total - sum(self._stages.values())}
        return (
            f"{total:.1f} s (" + ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items()) + ")"
        )
