"""This file has models without numbers stand in for real ones, in code that runs on the CPU.

So what a pipeline really does with its models can be counted: which it calls, how often, and with what.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import update_wrapper, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffsynth_lite.core.planning.kernels import ON_CUDA, FusedKernels, Replacements
from diffsynth_lite.core.planning.meters import CountingMeter, MetaResults, tensors_in

_META, _CPU = torch.device("meta"), torch.device("cpu")
_Model = TypeVar("_Model", bound=nn.Module)


class StandIns:
    """Counts what is held while models without numbers are called.

    To their callers they are on the CPU, and their weights are zeros that take no memory. In a call all but
    whole numbers is on the meta device, so that next to nothing is computed. What it returns are zeros.

    Attributes:
        peaks: of each call the method, and the most bytes at once in addition to its model's weights, its
            inputs included.
    """

    def __init__(self, kernels: Replacements = ON_CUDA) -> None:
        self._kernels, self._meter, self._results = kernels, CountingMeter(), MetaResults()
        self.peaks: list[tuple[str, int]] = []

    def put(
        self,
        model: _Model,
        returned: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        *,
        repeated: Sequence[str] = (),
        with_parts: bool = False,
    ) -> _Model:
        """Have a model on the meta device stand in for a real one.

        Args:
            returned: names of the methods that are called, and what the caller gets in place of a tensor that
                each returns; None is ``forward``, which gives zeros of its shape.
            repeated: modules in it that run again and again on alike inputs, such as tiles, and are counted
                once; an empty name is the model itself.
            with_parts: whether modules in it may be called without it, as the layers of some text encoders.
        """
        weights = _Weights(model)
        for module in map(model.get_submodule, repeated):
            vars(module)["forward"] = _Repeated(module.forward, lambda: self._meter)
        for method, convert in (returned or {"forward": zeros_like}).items():
            vars(model)[method] = self._counting(model, method, weights, convert)
        for place, module in model.named_modules() if with_parts else ():
            if place:
                vars(module)["forward"] = self._counting(module, "forward", weights, zeros_like)
        weights.hide()
        return model

    @property
    def peak(self) -> int:
        """Most bytes of a call; 0 where there was none."""
        return max((peak for _, peak in self.peaks), default=0)

    def _counting(
        self,
        model: nn.Module,
        method: str,
        weights: "_Weights",
        convert: Callable[[Tensor], Tensor],
    ) -> Callable[..., Any]:
        function = getattr(model, method)

        @wraps(function)  # a pipeline looks which arguments there are
        def call(*args: Any, **kwargs: Any) -> Any:
            if weights.is_shown:  # by itself, in another call
                return function(*args, **kwargs)
            self._meter = meter = CountingMeter(results=self._results)
            with weights.shown(), FusedKernels(self._kernels), meter, _KnownNumbers():
                meter.start()
                # Whole numbers are tokens, places and masks, which decide what is done.
                given: Any = _mapped(
                    (args, kwargs), lambda one: _to_meta(one) if one.is_floating_point() else one
                )
                result = function(*given[0], **given[1])
            self.peaks.append((method, meter.peak_bytes))
            return _mapped(result, convert)

        return call


def zeros_like(tensor: Tensor) -> Tensor:
    """Zeros on the CPU."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def one_pixel(tensor: Tensor) -> Tensor:
    """One zero for each image, whose values nobody reads: a clip has gigabytes."""
    return torch.zeros((*tensor.shape[:-2], 1, 1), dtype=tensor.dtype)


class _Weights:
    """What a model computes with: zeros on the CPU, or shown, on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self.is_shown = True
        holders: list[dict[str, Any]] = [
            held for module in model.modules() for held in (module._parameters, module._buffers)
        ]
        zeros: dict[Tensor, Tensor] = {}  # tied weights stay so
        self._places = [
            (held, name, tensor, zeros.setdefault(tensor, _zero_weight(tensor)))
            for held in holders
            for name, tensor in held.items()
            if tensor is not None
        ]

    def hide(self) -> None:
        """Leave zeros in their place."""
        self.is_shown = False
        for held, name, _, zero in self._places:
            held[name] = zero

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Scope in which they are on the meta device."""
        self.is_shown = True
        for held, name, weight, _ in self._places:
            held[name] = weight
        try:
            yield
        finally:
            self.hide()


def _zero_weight(weight: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
    return nn.Parameter(zero, requires_grad=False) if isinstance(weight, nn.Parameter) else zero


class _KnownNumbers(TorchDispatchMode):
    """Scope in which tensors on the CPU keep their numbers until they meet others that have none.

    So do places that a model counts itself: some text encoders look whether these follow each other.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and not args[0].is_floating_point():
            kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        if func is torch.ops.aten.arange.default and isinstance(args[0], int):
            kwargs = {**kwargs, "device": _CPU}
        tensors = list(tensors_in((*args, *kwargs.values())))
        if any(tensor.is_meta for tensor in tensors) and not all(tensor.is_meta for tensor in tensors):
            if func is torch.ops.aten.index.Tensor:  # only its numbers show how many a mask takes
                args = args[0], [place for index in args[1] for place in _places(index)]
            args, kwargs = _mapped((args, kwargs), _to_meta)
        return func(*args, **kwargs)


def _places(index: Tensor | None) -> Sequence[Tensor | None]:
    return index.nonzero(as_tuple=True) if index is not None and index.dtype == torch.bool else (index,)


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.to(_META)


@dataclass(frozen=True)
class _Shape:
    """What is kept of a tensor that gets another in its place."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "_Shape":
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def empty(self) -> Tensor:
        """A tensor like it."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class _Repeated:
    """A function that is called once for inputs of each shape: other calls hold and return the same."""

    def __init__(self, function: Callable[..., Any], meter: Callable[[], CountingMeter]) -> None:
        update_wrapper(self, function)
        self._function, self._meter = function, meter
        self._known: dict[str, tuple[int, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        key, meter = repr(_mapped(given, _Shape.of)), self._meter()
        if key not in self._known:
            before, peak = meter.num_bytes, meter.peak_bytes
            meter.restart_peak()
            result = self._function(*args, **kwargs)
            extra = meter.peak_bytes - before
            meter.reach(peak)
            self._known[key] = extra, _mapped([result, given], _Shape.of)
            return result
        extra, (result, changed) = self._known[key]
        meter.reach(meter.num_bytes + extra)
        for value, after in zip(given, changed, strict=True):
            if isinstance(value, list):
                value[:] = _mapped(after, _Shape.empty, kind=_Shape)
        return _mapped(result, _Shape.empty, kind=_Shape)


def _mapped(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """A value with what ``change`` makes of each tensor in it, or of what else is of a kind.

    It is looked for in containers, and among the attributes of other objects.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, MutableMapping):
        changed = copy(value)
        for key, one in value.items():
            changed[key] = _mapped(one, change, kind)
        return changed
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, change, kind) for one in value)
    found = {key: one for key, one in getattr(value, "__dict__", {}).items() if isinstance(one, kind)}
    if not found:
        return value
    changed = copy(value)
    vars(changed).update({key: change(one) for key, one in found.items()})
    return changed
