"""This file finds the dtype that autocast has a layer compute in, also on meta, where torch has none.

And it has layers that read the same tensor share one cast of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_ON_META: ContextVar[torch.dtype | None] = ContextVar("autocast_on_meta", default=None)
_CAST = "cast_of_this"
"""Where a tensor has the cast of it that is shared."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast has products on ``device`` computed in; None where it is off."""
    if device.type == "meta":
        return _ON_META.get()
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


@contextmanager
def autocast_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Scope in which :func:`autocast_dtype` returns ``dtype`` for the meta device."""
    token = _ON_META.set(dtype)
    try:
        yield
    finally:
        _ON_META.reset(token)


@contextmanager
def autocast_off_on_meta() -> Iterator[None]:
    """Scope in which ``torch.autocast("meta", enabled=False)`` is what it is on other devices.

    Some models of diffusers compute positions in such a scope of the device that they are on; torch has none
    for meta, and raises.
    """
    before = torch.autocast
    vars(torch)["autocast"] = _Autocast
    try:
        yield
    finally:
        vars(torch)["autocast"] = before


class _Autocast(torch.autocast):
    """``torch.autocast``, which may be off on meta, too."""

    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        self._is_off_on_meta = device_type == "meta" and not enabled
        super().__init__("cpu" if self._is_off_on_meta else device_type, dtype, enabled, cache_enabled)

    def __enter__(self) -> Any:
        if not self._is_off_on_meta:
            return super().__enter__()  # type: ignore[no-untyped-call]
        self._before = _ON_META.set(None)
        return self

    def __exit__(self, *exception: Any) -> Any:
        if not self._is_off_on_meta:
            return super().__exit__(*exception)
        return _ON_META.reset(self._before)


def shared_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in autocast's dtype, in memory that all share who cast the same ``x`` while it is there.

    Each has a gradient of its own, in ``x.dtype`` when it is added to others, as where autocast casts.
    Leaves come back as they are, of which autocast itself casts those that train once, and so does what
    nothing is kept of.
    """
    is_kept = torch.is_grad_enabled() and not x.is_leaf
    # A compiler shares by itself.
    if x.dtype == dtype or not is_kept or torch.compiler.is_compiling():
        return x
    version, cast = vars(x).get(_CAST, (None, None))
    if version != x._version or cast.dtype != dtype:
        cast = x.detach().to(dtype)
        vars(x)[_CAST] = x._version, cast
    output: Tensor = _Cast.apply(x, cast)  # type: ignore[no-untyped-call]
    return output


def drop_cast(x: Tensor) -> None:
    """Let go of the cast that others shared, for a tensor that outlives them, such as a block's input."""
    vars(x).pop(_CAST, None)


class _Cast(torch.autograd.Function):
    """``x.to(cast.dtype)``, which is there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None
