"""This file finds the matrix products that a recompute runs for nothing, and skips them.

A recompute is there for the tensors that backward needs. A product on which none of them depends is run for
nothing: in LoRA training the last one of a feed-forward part, where the gate that it is multiplied with is
frozen. Without these, the recompute of a Qwen-Image block takes 73 % of the operations, and gives the same
gradients to the last bit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from diffsynth_lite.core.gradient.arguments import take_tensors
from diffsynth_lite.core.gradient.call_sites import CallSites, Handler, Operators

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    [
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
        _aten.convolution.default,
    ]
)
"""The operators worth skipping."""
_CALLS = (
    *(functional.linear, functional.conv1d, functional.conv2d, functional.conv3d),
    *(torch.matmul, torch.mm, torch.addmm, torch.bmm, torch.baddbmm),
    *(
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.mm,
        Tensor.addmm,
        Tensor.bmm,
        Tensor.baddbmm,
    ),
)
"""The functions that end in them."""
_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Functions that read values past the operators."""


@dataclass(frozen=True)
class Product:
    """An operator call of a block, as it shows itself from outside.

    Attributes:
        func: the operator.
        inputs: shapes of its tensors.
        shape: of its result.
        strides: of its result.
        dtype: of its result.
    """

    func: Any
    inputs: tuple[torch.Size, ...]
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


DeadCalls = dict[int, list[Product]]
"""The calls to skip, by their place among a block's calls of ``_CALLS``, with the products that each runs."""


def find_dead_calls(run: Callable[[], Any], devices: Iterable[torch.device]) -> DeadCalls:
    """Run a block once and find the calls on whose values no tensor depends that is saved for backward.

    No activation is kept, and the random number generators are as before.

    Args:
        run: calls the block, with gradients enabled.
        devices: of the block's tensors.
    """
    trace = _Trace()
    accelerators = [device for device in set(devices) if device.type not in ("cpu", "meta")]
    fork = torch.random.fork_rng(
        [device.index for device in accelerators],
        device_type=accelerators[0].type if accelerators else "cuda",
    )
    handlers = dict.fromkeys(_CALLS, trace.call) | dict.fromkeys(_READS, trace.read)
    with fork, saved_tensors_hooks(trace.save, _never), CallSites(handlers), trace:
        run()
    return trace.dead_calls()


def skipper(dead: DeadCalls, on_skip: Callable[[], None]) -> dict[Any, Handler]:
    """Handlers for one recompute, in which the dead calls return tensors without values.

    Args:
        dead: what was found for this block.
        on_skip: called for each product skipped.
    """
    places = iter(range(10**9))

    def skip(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        products = dead.get(next(places))
        if products is None:
            return func(*args, **kwargs)
        with _Skip(products, on_skip):
            return func(*args, **kwargs)

    return dict.fromkeys(_CALLS, skip)


@dataclass(frozen=True)
class _Step:
    """An operator call of the trace: what it reads and writes, as numbers of values."""

    call: int | None
    product: Product | None
    reads: frozenset[int]
    writes: frozenset[int]
    is_fixed: bool


class _Trace(Operators):
    """Scope that notes which value each operator reads and writes, and which values are saved.

    A value is the content of a storage; it gets a number when an operator brings the storage forth. The
    address of a storage that was freed gets a new number when it comes forth again. Where an address is taken
    for an old value's, an operator seems needed that is not: the safe side.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[_Step] = []
        self._values: dict[int, int] = {}
        self._num_values = 0
        self._needed: set[int] = set()
        self._num_calls = 0
        self._call: int | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call whose operators are noted as its own."""
        self._call, self._num_calls = self._num_calls, self._num_calls + 1
        try:
            return func(*args, **kwargs)
        finally:
            self._call = None

    def read(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that reads values: they are needed."""
        self._needed |= self._values_of(take_tensors(args)[0])
        return func(*args, **kwargs)

    def save(self, tensor: Tensor) -> None:
        """Note that a tensor is saved for backward; it is not kept."""
        self._needed |= self._values_of([tensor])

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs, _ = take_tensors((args, kwargs))
        reads = self._values_of(inputs)
        known = {_address(tensor) for tensor in inputs}
        result = func(*args, **kwargs)
        outputs, _ = take_tensors(result)
        for tensor in outputs:
            if _address(tensor) not in known:
                self._number(_address(tensor))
        product = None
        if func in _PRODUCTS:
            (output,) = outputs
            shapes = tuple(tensor.shape for tensor in inputs)
            product = Product(func, shapes, output.shape, output.stride(), output.dtype)
        # What changes tensors, or gives something else than tensors, has effects that are not followed.
        is_fixed = func._schema.is_mutable or not outputs
        self._steps.append(_Step(self._call, product, reads, self._values_of(outputs), is_fixed))
        return result

    def dead_calls(self) -> DeadCalls:
        """The calls of which every product is dead."""
        needed, dead, alive = set(self._needed), DeadCalls(), set[int]()
        for step in reversed(self._steps):
            if step.is_fixed or step.writes & needed:
                needed |= step.reads
                if step.product is not None and step.call is not None:
                    alive.add(step.call)
            elif step.product is not None and step.call is not None:
                dead.setdefault(step.call, []).insert(0, step.product)
        return {call: products for call, products in dead.items() if call not in alive}

    def _values_of(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        addresses = [_address(tensor) for tensor in tensors]
        return frozenset(
            self._values[address] if address in self._values else self._number(address)
            for address in addresses
        )

    def _number(self, address: int) -> int:
        self._num_values += 1
        self._values[address] = self._num_values
        return self._num_values


class _Skip(Operators):
    """Scope in which the given products are not run."""

    def __init__(self, products: Sequence[Product], on_skip: Callable[[], None]) -> None:
        super().__init__()
        self._products = iter(products)
        self._on_skip = on_skip

    def operate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        product = next(self._products, None)
        inputs, _ = take_tensors((args, kwargs))
        if product is None or (func, tuple(tensor.shape for tensor in inputs)) != (
            product.func,
            product.inputs,
        ):
            raise RuntimeError(
                f"a block ran {func.name()} where it had run another operator with the same inputs and "
                "settings before; set skip_dead_ops off"
            )
        self._on_skip()
        return torch.empty_strided(
            product.shape, product.strides, dtype=product.dtype, device=inputs[0].device
        )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _never(_saved: None) -> Tensor:
    raise AssertionError("there is no backward pass through a trace")
