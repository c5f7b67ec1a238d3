"""This file saves what attention computes in a block's forward, so that the recompute does not run it.

A mode for functions costs a block about a microsecond a call. A mode for every operator under them, as
torch's own selective checkpointing uses, costs ten times that, so it is entered around attention only.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_SDPA = torch.nn.functional.scaled_dot_product_attention

Restore = Callable[[], Any]
"""Gives a saved tensor back, as a new one each time."""


class SavedAttention:
    """The attention outputs of one block call, in the order of its calls of scaled dot product attention.

    What is saved is all that the fused kernel returns: the output, and what its backward needs of the
    softmax. Two kinds of calls run again in the recompute: those that no fused kernel serves, because their
    backward needs all attention weights, and those that drop weights, because later dropout follows theirs.

    Args:
        save: saves a tensor, and returns the function that gives it back.
        count: gets ``attention_saved=1`` or ``attention_not_saved=1`` for each call.
    """

    def __init__(self, save: Callable[[Tensor], Restore], count: Callable[..., None]) -> None:
        self._save, self._count = save, count
        self._calls: list[list[Restore] | None] = []

    def recording(self) -> AbstractContextManager[Any]:
        """Scope of the forward pass: each call of attention is run, and its outputs saved."""
        self._calls.clear()

        def record(*args: Any, **kwargs: Any) -> Any:
            kernel = _Record(self._save)
            if _drops_weights(*args, **kwargs):
                value = _SDPA(*args, **kwargs)
            else:
                with kernel:
                    value = _SDPA(*args, **kwargs)
            self._calls.append(kernel.outputs)
            self._count(**{"attention_not_saved" if kernel.outputs is None else "attention_saved": 1})
            return value

        return _AttentionCalls(record)

    def replaying(self) -> AbstractContextManager[Any]:
        """Scope of one recompute: of a call whose outputs are saved, only autograd's part is run."""
        calls = iter(self._calls)

        def replay(*args: Any, **kwargs: Any) -> Any:
            outputs = next(calls)
            if outputs is None:
                return _SDPA(*args, **kwargs)
            with _Replay(outputs):
                return _SDPA(*args, **kwargs)

        return _AttentionCalls(replay)


class _AttentionCalls(TorchFunctionMode):
    """Scope in which ``run`` is called in place of scaled dot product attention."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self._run if func is _SDPA else func)(*args, **(kwargs or {}))


class _Record(TorchDispatchMode):
    """Scope that saves the outputs of the attention kernel run in it."""

    def __init__(self, save: Callable[[Tensor], Restore]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        self.outputs: list[Restore] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if _is_kernel(func):
            self.outputs = [self._saved(output) for output in outputs]
        return outputs

    def _saved(self, output: Any) -> Restore:
        if not isinstance(output, Tensor):
            return lambda: output
        # Detached: autograd writes its history into the tensors that the kernel returned.
        return self._save(output.detach())


class _Replay(TorchDispatchMode):
    """Scope in which the attention kernel is not run: its saved outputs are returned."""

    def __init__(self, outputs: list[Restore]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _is_kernel(func):
            return func(*args, **(kwargs or {}))
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
