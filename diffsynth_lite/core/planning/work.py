"""This file counts what a training step computes and copies, from a few blocks of each kind in place of all.

That is what any device does: floating point operations, bytes that kernels read and write, how many kernels
there are, and bytes over the bus. How long it takes is another question.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from diffsynth_lite.core.gradient.blocks import changed_attributes
from diffsynth_lite.core.gradient.checkpoint import runs_again
from diffsynth_lite.core.gradient.frames import in_backward, num_bytes
from diffsynth_lite.core.planning.counts import Repeat, told_of_parts, with_repeats
from diffsynth_lite.core.planning.meta_results import MetaResults
from diffsynth_lite.core.weights import FrozenLinear, WeightFormat

_aten = torch.ops.aten
_FLASH, _FLASH_BACKWARD = (
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_backward,
)
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # The same work under another name, which torch has no formula for.
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_FLASH],
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[_FLASH_BACKWARD],
}
_ONLY_WRITTEN = frozenset((_aten.copy_, _aten.fill_, _aten.zero_))
"""Operators that write their first argument and do not read it."""

KernelKind = Literal["product", "attention", "attention backward", "dequantise", "other"]


class Kernel(NamedTuple):
    """What one kernel does.

    Attributes:
        kind: ``product`` is a matrix product or a convolution, ``dequantise`` makes a frozen weight again,
            and ``other`` whatever reads and writes more than it computes.
        dtype: that it computes in.
        flops: floating point operations, of products and attention only.
        num_bytes: that it reads and writes.
    """

    kind: KernelKind
    dtype: torch.dtype
    flops: int
    num_bytes: int


Kernels = Counter[Kernel]
"""Kernels, each with how often it runs."""


class Sent(NamedTuple):
    """A copy to host memory that a block starts in its forward pass.

    Attributes:
        num_bytes: of it.
        after: what the block has computed by then.
    """

    num_bytes: int
    after: Kernels


@dataclass(kw_only=True)
class BlockWork:
    """What one block does in a step.

    Attributes:
        forward: kernels of the forward pass, with what follows it up to the next block.
        recompute: of the second run in the backward pass.
        backward: of the backward pass without it.
        sent: copies to host memory, in their order.
        num_bytes_fetched: copied back in its part of the backward pass, for whichever block.
    """

    forward: Kernels = field(default_factory=Counter)
    recompute: Kernels = field(default_factory=Counter)
    backward: Kernels = field(default_factory=Counter)
    sent: list[Sent] = field(default_factory=list)
    num_bytes_fetched: int = 0


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a forward and a backward pass do.

    Attributes:
        before: kernels before the first block.
        between: of the backward pass before the first block that it comes to.
        blocks: all blocks of the model in call order; those that stand for more come as often.
    """

    before: Kernels
    between: Kernels
    blocks: Sequence[BlockWork]


def count_work(
    loss: Callable[[], Tensor],
    backward: Callable[[Tensor], None],
    blocks: Sequence[nn.Module],
    meter: "WorkMeter",
    *,
    repeats: Sequence[Repeat] = (),
) -> StepWork:
    """Take a training step, and say what it does if some blocks stand for more.

    Args:
        loss: the forward pass, through an engine that offloads to memory which ``meter`` was told of. The
            step before was of the same kind, so that the engine knows what the blocks share.
        backward: the backward pass of it.
        blocks: all that the forward pass calls, in call order.
        meter: is entered.
        repeats: which blocks stand for more, in call order.
    """
    meter.begin("before")
    with meter, told_of_parts(blocks, meter.begin, meter.leave_block):
        value = loss()
        meter.begin("between")
        backward(value)
    names = with_repeats([("forward", place) for place in range(len(blocks))], repeats)
    works = [meter.block(place) for place in range(len(blocks))]
    return StepWork(
        before=meter.kernels("before"),
        between=meter.kernels("between"),
        blocks=[works[place] for _, place in names],
    )


class WorkMeter(TorchDispatchMode):
    """Notes the kernels of operators, by the part of the step that they run in.

    Args:
        results: of operators on meta, where other meters share them.
    """

    def __init__(self, results: MetaResults | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results or MetaResults()
        self._host: dict[int, Tensor] = {}
        self._outside: dict[Any, Kernels] = {}
        self._blocks: dict[int, BlockWork] = {}
        self._part: Any = None
        self._begun: set[Any] = set()
        self._is_between_blocks = True
        self._sent_between: list[Sent] = []

    def ignore(self, tensor: Tensor) -> None:
        """From now on ``tensor`` stands for host memory: what is copied there and back goes over the bus."""
        self._host[tensor.untyped_storage()._cdata] = tensor

    def begin(self, part: Any) -> None:
        """What comes now belongs to this part, unless it has begun before.

        Args:
            part: ``("forward", place)`` or ``("backward", place)`` of a block, or any name.
        """
        if part not in self._begun:
            self._begun.add(part)
            self._part = part
            if part[0] == "forward":
                # The inputs of a block are sent before it begins.
                self.block(part[1]).sent, self._sent_between = self._sent_between, []
                self._is_between_blocks = False

    def leave_block(self) -> None:
        """What is sent now is sent for the block that comes next."""
        self._is_between_blocks = True

    def kernels(self, name: str) -> Kernels:
        """Those of a part outside of the blocks."""
        return self._outside.setdefault(name, Counter())

    def block(self, place: int) -> BlockWork:
        """What was noted of a block."""
        return self._blocks.setdefault(place, BlockWork())

    def note(self, kernel: Kernel) -> None:
        """Count a kernel that runs now."""
        if isinstance(self._part, str):
            self.kernels(self._part)[kernel] += 1
            return
        phase, place = self._part
        block = self.block(place)
        if phase == "forward":
            block.forward[kernel] += 1
        elif in_backward() and runs_again():
            block.recompute[kernel] += 1
        else:
            block.backward[kernel] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = list(_tensors((*args, *(value for key, value in kwargs.items() if key != "out"))))
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in read):
            # A product that waits in a recompute: what it comes to is asked for again.
            return NotImplemented
        value = self._results.of(func, args, kwargs)
        written = list(_tensors((value,)))
        if func is _aten.copy_.default and self._notes_copy(*args[:2]):
            return value
        if _is_kernel(func, read, written):
            self.note(_kernel(func, args, kwargs, value, read, written))
        return value

    def _notes_copy(self, target: Tensor, source: Tensor) -> bool:
        """Whether a copy is one over the bus; then it is counted."""
        goes, comes = (tensor.untyped_storage()._cdata in self._host for tensor in (target, source))
        if goes and self._is_between_blocks:
            self._sent_between.append(Sent(num_bytes(target), Counter()))
        elif goes:
            block = self.block(self._part[1])
            block.sent.append(Sent(num_bytes(target), Counter(block.forward)))
        elif comes:
            self.block(self._part[1]).num_bytes_fetched += num_bytes(source)
        return goes or comes


class MeteredFormat(WeightFormat):
    """Stands for a format of frozen weights on the meta device, and notes each weight that is made again."""

    def __init__(self, inner: WeightFormat, meter: WorkMeter) -> None:
        self._inner, self._meter = inner, meter

    @classmethod
    def in_layers_of(cls, model: nn.Module, meter: WorkMeter) -> AbstractContextManager[None]:
        """Scope in which all layers of a model are noted."""
        layers = [module for module in model.modules() if isinstance(module, FrozenLinear)]
        return changed_attributes({layer: {"format": cls(layer.format, meter)} for layer in layers})

    def empty(self, num_rows: int, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return self._inner.empty(num_rows, num_columns, device)

    def _quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner._quantised(rows)

    def _spans(self, num_columns: int) -> tuple[int, int]:
        return self._inner._spans(num_columns)

    def dense(self, values: Tensor, scales: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        weight = torch.empty(*shape, dtype=dtype, device=values.device)
        moved = values.nbytes + scales.nbytes + weight.nbytes
        self._meter.note(Kernel("dequantise", dtype, 0, moved))
        return weight


def _kernel(
    func: Any, args: Any, kwargs: Any, value: Any, read: Sequence[Tensor], written: Sequence[Tensor]
) -> Kernel:
    formula = _FLOPS.get(func.overloadpacket)
    if func.overloadpacket in _ONLY_WRITTEN:
        read = read[1:]
    moved = sum(map(_num_bytes_read, read)) + sum(map(num_bytes, written))
    dtype = written[0].dtype
    if formula is None:
        return Kernel("other", dtype, 0, moved)
    kind: KernelKind = "product"
    if func.name().startswith("aten::_scaled_dot_product"):
        kind = "attention backward" if "backward" in func.name() else "attention"
    return Kernel(kind, dtype, formula(*args, **kwargs, out_val=value), moved)


def _is_kernel(func: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> bool:
    """Whether an operator computes anything: neither a view, nor memory that is left as it is."""
    if not written or func.name().startswith(("aten::empty", "aten::new_empty")):
        return False
    storages = {tensor.untyped_storage()._cdata for tensor in read}
    is_view = written[0].untyped_storage()._cdata in storages
    return func._schema.is_mutable or not is_view


def _num_bytes_read(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor: what is repeated in it is there once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
