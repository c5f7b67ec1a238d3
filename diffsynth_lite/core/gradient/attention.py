"""This file saves what attention computes in a block's forward, so that the recompute does not run it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffsynth_lite.core.gradient.call_sites import Handler, Operators

_SDPA = torch.nn.functional.scaled_dot_product_attention

Restore = Callable[[], Any]
"""Gives a tensor that was put away, as a new one each time."""


class SavedAttention:
    """The attention outputs of one block call, in the order of its calls of scaled dot product attention.

    What is saved is all that the fused kernel returns: the output, and what its backward needs of the
    softmax. Two kinds of calls run again in the recompute: those that no fused kernel serves, because their
    backward needs all attention weights, and those that drop weights, because later dropout follows theirs.

    Args:
        save: puts a tensor away.
        count: gets ``attention_saved=1`` or ``attention_not_saved=1`` for each call.
    """

    def __init__(self, save: Callable[[Tensor], Restore], count: Callable[..., None]) -> None:
        self._save, self._count = save, count
        self._calls: list[list[Restore] | None] = []

    def recorder(self) -> dict[Any, Handler]:
        """Handlers for the forward pass: each call is run, and its outputs saved."""
        self._calls.clear()

        def record(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kernel = _Record(self._save)
            if _drops_weights(*args, **kwargs):
                value = func(*args, **kwargs)
            else:
                with kernel:
                    value = func(*args, **kwargs)
            self._calls.append(kernel.outputs)
            self._count(**{"attention_not_saved" if kernel.outputs is None else "attention_saved": 1})
            return value

        return {_SDPA: record}

    def replayer(self) -> dict[Any, Handler]:
        """Handlers for one recompute: of a call whose outputs are saved, only autograd's part is run."""
        calls = iter(self._calls)

        def replay(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            outputs = next(calls)
            if outputs is None:
                return func(*args, **kwargs)
            with _Replay(outputs):
                return func(*args, **kwargs)

        return {_SDPA: replay}


class _Record(Operators):
    """Scope that saves the outputs of the attention kernel run in it."""

    def __init__(self, save: Callable[[Tensor], Restore]) -> None:
        super().__init__()
        self._save = save
        self.outputs: list[Restore] | None = None

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = func(*args, **kwargs)
        if _is_kernel(func):
            self.outputs = [self._saved(output) for output in outputs]
        return outputs

    def _saved(self, output: Any) -> Restore:
        if not isinstance(output, Tensor):
            return lambda: output
        # Detached: autograd writes its history into the tensors that the kernel returned.
        return self._save(output.detach())


class _Replay(Operators):
    """Scope in which the attention kernel is not run: its saved outputs are returned."""

    def __init__(self, outputs: list[Restore]) -> None:
        super().__init__()
        self._outputs = outputs

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_kernel(func):
            return func(*args, **kwargs)
        return tuple(restore() for restore in self._outputs)


def _is_kernel(func: Any) -> bool:
    """Whether an operator is a fused attention kernel; each device and backend has its own."""
    name: str = func.name()
    return name.startswith("aten::_scaled_dot_product_") and "math" not in name


def _drops_weights(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
) -> bool:
    """Whether a call of scaled dot product attention drops attention weights."""
    return dropout_p > 0
