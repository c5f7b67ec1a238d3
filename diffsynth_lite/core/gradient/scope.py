"""This file says which engine the block calls work through, and what happens to the block at hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from diffsynth_lite.core.gradient.engine import GradientEngine
from diffsynth_lite.core.gradient.policies import Treatment

_engine: ContextVar[GradientEngine | None] = ContextVar("gradient_engine", default=None)
_block: ContextVar[tuple[GradientEngine, Treatment] | None] = ContextVar("block_at_hand", default=None)


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


class BlockAtHand:
    """Scope of one block call, whose engine and treatment are known: it is entered for every block."""

    __slots__ = ("_token", "_value")

    def __init__(self, engine: GradientEngine, treatment: Treatment) -> None:
        self._value = engine, treatment

    def __enter__(self) -> None:
        self._token = _block.set(self._value)

    def __exit__(self, *_error: object) -> None:
        _block.reset(self._token)


def take_engine_and_treatment() -> tuple[GradientEngine, Treatment]:
    """Those of the ``BlockAtHand`` scope, once; for other calls, the engine's for a selected block.

    A block that has blocks of its own runs them alike in forward, inside the scope, and in its recompute.
    """
    at_hand = _block.get()
    if at_hand is not None:
        _block.set(None)
        return at_hand
    engine = current_engine()
    return engine, engine.policy.selected
