"""This file gives what operators return on the meta device, and asks torch once for inputs that are alike.

Torch works most of it out in Python, which takes longer than a GPU would need to compute the numbers.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_META = torch.device("meta")
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Layout(NamedTuple):
    """What tells a tensor on the meta device from another."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


class _UnknownError(Exception):
    """A call that says too little, or a result that says too much, for the next to be alike."""


class MetaResults:
    """Calls operators, those that make new tensors of others on the meta device once for alike inputs."""

    def __init__(self) -> None:
        self._makes_new: dict[Any, bool] = {}
        self._known: dict[Any, Any] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What an operator returns, as ``__torch_dispatch__`` of a mode is told of it.

        Tensors have the shape, strides and dtype that torch gives them, and memory of their own.
        """
        if func not in self._makes_new:
            self._makes_new[func] = _makes_new(func)
        if not self._makes_new[func]:
            return func(*args, **kwargs)
        try:
            key = func, _described(args), tuple((name, _described(one)) for name, one in kwargs.items())
        except _UnknownError:
            return func(*args, **kwargs)
        if key in self._known:
            return _again(self._known[key])
        value = func(*args, **kwargs)
        try:
            self._known[key] = _noted(value, {one.untyped_storage()._cdata for one in tensors_in(args)})
        except _UnknownError:
            self._makes_new[func] = False
        return value


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operator; torch's pytree takes far longer."""
    for value in values:
        # A product that waits in a recompute is of a class of its own, and has no memory yet.
        if type(value) in (Tensor, nn.Parameter):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _makes_new(func: Any) -> bool:
    """Whether an operator says that it changes nothing, and returns no view."""
    schema = func._schema
    return not schema.is_mutable and all(
        one.alias_info is None for one in (*schema.arguments, *schema.returns)
    )


def _described(value: Any) -> Any:
    """Equal for arguments of which an operator makes the same; numbers of other types promote otherwise."""
    if type(value) in (Tensor, nn.Parameter):
        if not value.is_meta or value.is_complex():  # numbers may matter, or be conjugated when they are read
            raise _UnknownError
        return _Layout(value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if type(value) not in _PLAIN:
        raise _UnknownError
    return type(value), value


def _noted(value: Any, known: set[int]) -> Any:
    """What to make of a result again, if it has memory of its own: some views are not called views."""
    if isinstance(value, list | tuple):
        return type(value), [_noted(one, known) for one in value]
    if value is None:
        return None
    if type(value) is not Tensor or not value.is_meta:
        raise _UnknownError
    layout, storage = _Layout(value.shape, value.stride(), value.dtype), value.untyped_storage()
    if storage._cdata in known or storage.nbytes() != layout.empty().untyped_storage().nbytes():
        raise _UnknownError
    known.add(storage._cdata)
    return layout


def _again(noted: Any) -> Any:
    if isinstance(noted, _Layout):
        return noted.empty()
    if noted is None:
        return None
    kind, values = noted
    return kind(map(_again, values))
