"""This file says which engine the block calls work through."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from diffsynth_lite.core.gradient.engine import GradientEngine

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
    """The engine of the innermost ``gradient_engine`` scope; outside of any, a new one for one block call.

    A new one skips no dead operations, because it forgets them: finding them takes longer than running them.
    """
    # No other call would ever make room for its tensors.
    return _engine.get() or GradientEngine(resident_blocks=0, prefetched_blocks=0, skip_dead_ops=False)
