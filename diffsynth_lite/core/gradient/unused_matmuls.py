"""This file spares a recompute the matrix products whose results no gradient needs.

A recompute is there for the tensors that backward needs. Where a block computes ``hidden + gate * layer(x)``
and the gate does not train, the result of ``layer`` is none of them. A model family names such layers. In a
recompute their products wait until something reads the result: in LoRA training mostly nothing does, and they
never run. Where the result is needed after all, because the gate has a LoRA or half precision is clipped,
autograd saves it, and the product runs then, by the same kernel on the same values. So a wrong name gains
nothing, but never changes a gradient.
"""

from collections.abc import Callable, Iterable, Iterator, MutableSet, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors
from diffsynth_lite.core.gradient.blocks import changed_attributes

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
        layers: modules of the block.
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
        num_products: that were asked for.
        num_waiting: those of them that have not run.
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
        # What counts operators or memory must not count this.
        with _disable_current_modes():
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
        """What the operator computes; it runs the first time.

        Raises:
            RuntimeError: an input of it was changed in place meanwhile.
        """
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
