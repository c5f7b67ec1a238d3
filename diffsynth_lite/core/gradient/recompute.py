"""This file spares a recompute what need not run again: saved attention, and products that nobody needs.

**Attention.** A mode for functions costs a block about a microsecond a call. A mode for every operator under
them, as torch's own selective checkpointing uses, costs ten times that, so it is entered around attention
only.

**Unused products.** A recompute is there for the tensors that backward needs. Where a block computes
``hidden + gate * layer(x)`` and the gate does not train, the result of ``layer`` is none of them. A model
family names such layers. In a recompute their products wait until something reads the result: in LoRA
training mostly nothing does, and they never run. Where the result is needed after all, because the gate has a
LoRA or half precision is clipped, autograd saves it, and the product runs then, by the same kernel on the
same values. So a wrong name gains nothing, but never changes a gradient.
"""

from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors
from diffsynth_lite.core.gradient.blocks import changed_attributes, find_submodule, module_of
from diffsynth_lite.core.gradient.engine import GradientEngine
from diffsynth_lite.core.gradient.policies import BlockStrategy

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


_aten = torch.ops.aten
_PRODUCTS = frozenset(
    [
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        _aten.convolution.default,
    ]
)
"""The operators worth waiting with."""
_FOLLOWERS = frozenset(
    [
        *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten._to_copy.default),
        *(_aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.unsqueeze.default),
        *(_aten.view.default, _aten._unsafe_view.default, _aten.expand.default, _aten.slice.Tensor),
    ]
)
"""The operators that wait with them; whatever else gets their results makes them run."""


@contextmanager
def products_deferred(
    layers: Iterable[nn.Module], needed: MutableSet[nn.Module], count: Callable[[int], None]
) -> Iterator[None]:
    """Scope of one recompute, in which the products of ``layers`` run only if their results are read.

    Args:
        needed: layers all of whose products ran after all in an earlier recompute; they run at once. What
            is found in this one is added.
        count: gets 1 for each product that waits, and -1 when it runs after all.
    """
    recomputes = {layer: _Recompute(count) for layer in layers if layer not in needed}
    try:
        with changed_attributes(
            {
                layer: {"forward": recompute.deferring(layer.forward)}
                for layer, recompute in recomputes.items()
            }
        ):
            yield
    finally:
        for layer, recompute in recomputes.items():
            recompute.is_over = True
            if recompute.num_products and not recompute.num_waiting:
                needed.add(layer)


class _Recompute(TorchDispatchMode):
    """Scope of one layer's forward in a recompute, in which products wait.

    Attributes:
        is_over: nothing waits any more: what is read now is read by the backward pass.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._count = count
        self.num_products = self.num_waiting = 0
        self.is_over = False

    def deferring(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` in this scope."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return forward(*args, **kwargs)

        return run

    def count(self, change: int) -> None:
        """Count a product that waits, 1, or that runs after all, -1."""
        self.num_waiting += change
        self._count(change)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _PRODUCTS or not _can_wait(take_tensors((args, kwargs))[0]):
            return func(*args, **(kwargs or {}))
        self.num_products += 1
        self.count(1)
        return _Waiting(self, func, args, kwargs or {})


class _Waiting(Tensor):
    """The result of an operator that has not run. It has a shape; whoever reads its values runs it first."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    _recompute: _Recompute
    _call: tuple[Any, list[Tensor], Any, list[int]] | None
    _form: Tensor
    _value: Tensor

    @staticmethod
    def __new__(
        cls, recompute: _Recompute, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "_Waiting":
        tensors, template = take_tensors((args, kwargs))
        # What counts operators or memory must not count this; modes for functions would see each attribute.
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            form_args, form_kwargs = put_tensors(template, [_form_of(tensor) for tensor in tensors])
            form = func(*form_args, **form_kwargs)
        self: _Waiting = Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), dtype=form.dtype, device=tensors[0].device
        )
        self._recompute, self._form = recompute, form
        self._call = func, tensors, template, [tensor._version for tensor in tensors]
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors, template = take_tensors((args, kwargs))
        recompute = next(tensor._recompute for tensor in tensors if isinstance(tensor, _Waiting))
        # A form is on no device, so it cannot be copied to one.
        follows = func in _FOLLOWERS and kwargs.get("device") is None
        if follows and not recompute.is_over and _can_wait(tensors):
            return _Waiting(recompute, func, args, kwargs)
        run_args, run_kwargs = put_tensors(template, [_value_of(tensor) for tensor in tensors])
        return func(*run_args, **run_kwargs)

    def value(self) -> Tensor:
        """What the operator computes; it runs the first time."""
        if self._call is not None:
            func, tensors, template, versions = self._call
            if [tensor._version for tensor in tensors] != versions:
                raise RuntimeError(
                    f"a block changed an input of {func.name()} in place, which waits in its recompute; "
                    "take the layer out of unused_matmuls, or set skip_dead_ops off"
                )
            args, kwargs = put_tensors(template, [_value_of(tensor) for tensor in tensors])
            # Not everything that reads a tensor, such as ``.data``, has autograd switched off by now.
            with torch.no_grad():
                self._value = func(*args, **kwargs)
            self._call = None
            if func in _PRODUCTS:
                self._recompute.count(-1)
        return self._value


def _can_wait(tensors: Sequence[Tensor]) -> bool:
    """Whether an operator reads nothing but plain tensors of one device, and what already waits."""
    plain = (Tensor, nn.Parameter, _Waiting)
    return len({tensor.device for tensor in tensors}) == 1 and all(
        type(tensor) in plain for tensor in tensors
    )


def _value_of(tensor: Tensor) -> Tensor:
    return tensor.value() if isinstance(tensor, _Waiting) else tensor


def _form_of(tensor: Tensor) -> Tensor:
    """A tensor without memory, of the same shape, strides and dtype."""
    if isinstance(tensor, _Waiting):
        return tensor._form
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class RecomputeSavings:
    """What one block call spares its recomputes: saved attention, and matrix products that nobody needs.

    Compiled blocks are left as they are: their calls are not seen, and the compiler does both itself.
    """

    def __init__(
        self,
        engine: GradientEngine,
        strategy: BlockStrategy,
        block: Callable[..., Any],
        unused_matmuls: Sequence[str],
    ) -> None:
        self._engine, module = engine, module_of(block)
        self._attention: SavedAttention | None = None
        self._layers: list[nn.Module] = []
        if module is not None and engine.is_compiled(module):
            return
        if strategy.save_attention != "no":
            save = partial(engine.save_attention, offload=strategy.save_attention == "park")
            self._attention = SavedAttention(save, engine.count)
        if module is not None and engine.skip_dead_ops and strategy.checkpoint is None:
            found = (find_submodule(module, name) for name in unused_matmuls)
            self._layers = [layer for layer in found if layer is not None]

    def forward(self) -> AbstractContextManager[Any]:
        """Scope of the forward pass."""
        return self._attention.recording() if self._attention else nullcontext()

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Scope of one recompute."""
        attention = self._attention.replaying() if self._attention else nullcontext()
        with attention, products_deferred(self._layers, self._engine.needed_matmuls, self._count):
            yield

    def _count(self, products: int) -> None:
        self._engine.count(dead_ops_skipped=products)
