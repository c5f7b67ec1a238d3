"""This file says what autocast has a layer compute in, also on meta, where torch has none."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_ON_META: ContextVar[torch.dtype | None] = ContextVar("autocast_on_meta", default=None)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast has products on ``device`` computed in; None where it is off."""
    if device.type == "meta":
        return _ON_META.get()
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


@contextmanager
def autocast_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Scope in which :func:`autocast_dtype` says ``dtype`` of the meta device."""
    token = _ON_META.set(dtype)
    try:
        yield
    finally:
        _ON_META.reset(token)
