"""This file counts bytes of live tensors, and what operators do, on any device or on meta.

On meta torch is asked once for inputs that are alike: it works most of it out in Python, which takes longer
than a GPU would need to compute the numbers.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from diffsynth_lite.core.transfer.backends import PlainBackend

_META = torch.device("meta")
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Layout(NamedTuple):
    """What makes a difference between tensors on the meta device."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)


class _UnknownError(Exception):
    """A call or a result that another one with the same key may differ from."""


class MetaResults:
    """Calls operators, those that make new tensors of others on the meta device once for alike inputs."""

    def __init__(self) -> None:
        self._makes_new: dict[Any, bool] = {}
        self._known: dict[Any, Any] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operator, with the arguments of a mode's ``__torch_dispatch__``.

        Tensors have the shape, strides and dtype that torch gives them, and memory of their own.
        """
        # Each is looked for once: torch works out the hash of an operator in Python.
        makes_new = self._makes_new.get(func)
        if makes_new is None:
            makes_new = self._makes_new[func] = _makes_new(func)
        if not makes_new:
            return func(*args, **kwargs)
        try:
            key = func, _described(args), tuple((name, _described(one)) for name, one in kwargs.items())
        except _UnknownError:
            return func(*args, **kwargs)
        if known := self._known.get(key):
            return _again(known)
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
    """Whether an operator's schema has it change nothing, and return no view."""
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
    if type(value) not in _CONSTANTS:
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


_PLAIN = frozenset((Tensor, nn.Parameter))
_aten = torch.ops.aten
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # Attention as it is counted on meta: the same work under another name, which torch has no formula for.
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _aten._scaled_dot_product_flash_attention_backward
    ],
}


def _of_shapes(formula: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any) -> int:
    """What a formula of torch's makes of an operator; its pytree took 8 % of a count to find shapes."""
    plain = getattr(formula, "__wrapped__", None)
    if plain is None:  # It takes the tensors themselves.
        return int(formula(*args, **kwargs, out_val=value))
    shapes = {name: _shapes(one) for name, one in kwargs.items()}
    return int(plain(*_shapes(args), **shapes, out_shape=_shapes(value)))


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shapes, value)) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Work:
    """What operators do.

    Attributes:
        flops: floating point operations of matrix products, convolutions and attention.
    """

    flops: int = 0
    attention_flops: int = 0
    num_bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.attention_flops + other.attention_flops,
            self.num_bytes + other.num_bytes,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(
            self.flops - other.flops,
            self.attention_flops - other.attention_flops,
            self.num_bytes - other.num_bytes,
        )


class LiveBytes:
    """Bytes of tensor storages, each counted once and as long as it is alive."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def add(self, tensor: Tensor, *, is_counted: bool = True) -> bool:
        """Count the storage of ``tensor`` from now on, unless it is known; or know it as not counted.

        Returns:
            Whether it was not known.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return False
        size = storage.nbytes() if is_counted else 0
        self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), size
        self._grow(size)
        return True

    def ignore(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` no longer."""
        self._forget(tensor.untyped_storage()._cdata)
        self.add(tensor, is_counted=False)

    def _forget(self, key: int) -> None:
        _, size = self._storages.pop(key, (None, 0))
        self._grow(-size)

    def _grow(self, size: int) -> None:
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class CountingMeter(TorchDispatchMode):
    """Memory of the storages that operators return, and their work: operations by torch's own formulas.

    What kernels use inside of themselves is not seen.

    Args:
        results: of operators on meta, where other meters share them.
    """

    def __init__(self, device: torch.device | None = None, results: MetaResults | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results or MetaResults()
        self._live, self._before, self._device = LiveBytes(), 0, device
        self._flops = self._attention_flops = self._num_bytes_moved = 0

    def start(self) -> None:
        """Begin to measure: what is there now does not count."""
        self._before = self._live.peak_bytes = self._live.num_bytes

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self._live.peak_bytes = self._live.num_bytes

    def reach(self, num_bytes: int) -> None:
        """Note that so many bytes are held for a moment."""
        self._live.peak_bytes = max(self._live.peak_bytes, self._before + num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes now."""
        return self._live.num_bytes - self._before

    @property
    def peak_bytes(self) -> int:
        """Most bytes since the measurement, or the last search for a peak, began."""
        return self._live.peak_bytes - self._before

    @property
    def work(self) -> Work:
        """Of all operators so far."""
        return Work(self._flops, self._attention_flops, self._num_bytes_moved)

    def ignore(self, tensor: Tensor) -> None:
        """From now on ``tensor`` stands for host memory."""
        self._live.ignore(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _PLAIN.issuperset(types):
            return NotImplemented  # a product that waits in a recompute is asked for again once it is needed
        # In a backward pass, function modes would see each attribute that is read here.
        with torch._C.DisableTorchFunction():
            return self._counted(func, args, kwargs or {})

    def _counted(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator returns; its memory and work are added."""
        read = list(tensors_in((*args, *kwargs.values())))
        for tensor in read:
            self._live.add(tensor, is_counted=False)  # from outside
        value = self._results.of(func, args, kwargs)
        written = list(tensors_in((value,)))
        is_new = [self._live.add(one, is_counted=self._device in (None, one.device)) for one in written]
        if read and (any(is_new) or func._schema.is_mutable):  # not a view
            self._num_bytes_moved += sum(tensor.nbytes for tensor in (*read, *written))
            if formula := _FLOPS.get(func.overloadpacket):
                flops = _of_shapes(formula, args, kwargs, value)
                self._flops += flops
                self._attention_flops += flops * func.name().startswith("aten::_scaled_dot_product")
        return value


class HostBackend(PlainBackend):
    """Plain copies into memory that stands for the host's: on ``device`` itself, but not counted there."""

    def __init__(self, device: torch.device, meter: CountingMeter) -> None:
        self._device, self._meter = device, meter

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._meter.ignore(buffer)
        return buffer
