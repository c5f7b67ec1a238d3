"""This file remembers which calls are dead in which block calls, so that they are searched once."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from diffsynth_lite.core.gradient.dead_ops import DeadCalls, find_dead_calls
from diffsynth_lite.core.gradient.signature import block_signature, call_signature

_RECOMPUTES_UNTIL_NEXT_LOOK = 100


class KnownDeadCalls:
    """The dead calls of all block calls seen so far.

    Whether a block still is of the kind in which something was found is checked in every recompute: half a
    millisecond, well spent where it saves a product. Where nothing was found nothing is skipped, which is
    right whatever changes, so that such a block is looked at only now and then.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, DeadCalls] = {}
        self._recomputes_to_go: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def of_call(
        self, module: nn.Module, tensors: Sequence[Tensor], template: Any, run: Callable[[], Any]
    ) -> DeadCalls:
        """What the recompute of a block call can skip; empty also for calls that are not followed.

        Args:
            module: the block.
            tensors: those among its arguments.
            template: the rest of its arguments, from ``take_tensors``.
            run: makes the call, to search it.
        """
        to_go = self._recomputes_to_go.get(module, 0)
        if to_go:
            self._recomputes_to_go[module] = to_go - 1
            return {}
        dead = self._look_at(module, tensors, template, run)
        if not dead:
            self._recomputes_to_go[module] = _RECOMPUTES_UNTIL_NEXT_LOOK
        return dead

    def _look_at(
        self, module: nn.Module, tensors: Sequence[Tensor], template: Any, run: Callable[[], Any]
    ) -> DeadCalls:
        call, block = call_signature(tensors, template), block_signature(module)
        if call is None or block is None:
            return {}
        if (block, call) not in self._found:
            self._found[block, call] = find_dead_calls(run, [tensor.device for tensor in tensors])
        return self._found[block, call]
