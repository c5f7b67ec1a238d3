"""This file spares the recompute of one block call what it need not run: saved attention, dead products."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from diffsynth_lite.core.gradient.attention import SavedAttention
from diffsynth_lite.core.gradient.call_sites import CallSites, Handler, is_compiled, module_of
from diffsynth_lite.core.gradient.dead_ops import skipper
from diffsynth_lite.core.gradient.engine import GradientEngine
from diffsynth_lite.core.gradient.policies import Treatment


class Savings:
    """What one block call spares its recomputes.

    Compiled blocks are left alone: their calls are not seen, and the compiler fuses and drops them itself.

    Args:
        engine: of the call.
        treatment: of the block.
        block: the block.
    """

    def __init__(self, engine: GradientEngine, treatment: Treatment, block: Callable[..., Any]) -> None:
        module = module_of(block)
        self._engine = engine
        self._module = module if engine.skip_dead_ops and treatment.checkpoint is None else None
        self._attention: SavedAttention | None = None
        if treatment.save_attention != "no" and not (module is not None and is_compiled(module)):
            save = partial(engine.save_attention, park=treatment.save_attention == "park")
            self._attention = SavedAttention(save, engine.count)

    def forward(self) -> AbstractContextManager[Any]:
        """Scope of the forward pass."""
        return CallSites(self._attention.recorder()) if self._attention else nullcontext()

    def recompute(
        self, call: Callable[[], Any], tensors: Sequence[Tensor], template: Any
    ) -> AbstractContextManager[Any]:
        """Scope of one recompute.

        Args:
            call: runs the block, to find its dead operations.
            tensors: that it gets.
            template: the rest of its arguments.
        """
        handlers: dict[Any, Handler] = {}
        if self._attention is not None:
            handlers |= self._attention.replayer()
        if self._module is not None:
            dead = self._engine.dead_calls.of_call(self._module, tensors, template, call)
            if dead:
                handlers |= skipper(dead, lambda: self._engine.count(dead_ops_skipped=1))
        return CallSites(handlers) if handlers else nullcontext()
