"""How the gradient benchmarks measure a training step: its memory, exactly, and its time."""

import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Protocol

import torch
from peft import LoraConfig
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from diffsynth_lite.core.gradient import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    block_runner,
    gradient_engine,
)
from diffsynth_lite.core.planning.kernels import ON_ALL_DEVICES, FusedKernels, backward_in_scope
from diffsynth_lite.core.planning.meters import CountingMeter, HostBackend
from diffsynth_lite.pipelines.base.quantized import kept_in_fp32

STRATEGIES = {
    "none": KEEP,
    "every block": RECOMPUTE,
    "offload every block": OFFLOAD,
    "every block, save attention": BlockStrategy(save_attention="keep"),
    "every block, offload attention": BlockStrategy(save_attention="park"),
    "offload every block, save attention": BlockStrategy(offload=True, save_attention="keep"),
    "offload every block and attention": BlockStrategy(offload=True, save_attention="park"),
}
"""What can happen to a block, by the name of its row when it happens to all."""


class TrainedModel:
    """A model with an input, ready for training steps.

    Args:
        model: with its blocks as they are; it is put into training mode.
        device: cpu, cuda, or meta, where nothing is computed but every tensor has its size.
        dtype: of the weights.
        lora: adapters to train, in float32; the model's own weights are then frozen. None: they train.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, lora: LoraConfig | None = None
    ) -> None:
        self.device, self.model = device, model.train()
        for name, weight in self.model.named_parameters():
            if not kept_in_fp32(self.model, name):
                weight.data = weight.data.to(dtype)
        if lora is not None:
            self.model.requires_grad_(False)
            self.model.add_adapter(lora)
            for weight in self.trained():
                weight.data = weight.data.to(device, torch.float32)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.model.parameters())

    def trained(self) -> list[nn.Parameter]:
        """The weights that train."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def backward(self, loss: Tensor) -> None:
        """The backward pass of ``loss``."""
        if self.device.type != "meta":
            loss.backward()
            return
        with self.attention():
            backward_in_scope(loss)

    def attention(self) -> AbstractContextManager[Any]:
        """Scope in which attention is one kernel, also on meta."""
        return FusedKernels(ON_ALL_DEVICES) if self.device.type == "meta" else nullcontext()


class SeveralBlocks(TrainedModel, ABC):
    """A model that can be run with fewer blocks than it has."""

    unused_matmuls: Sequence[str] = ()

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """How many blocks a forward pass runs."""

    @abstractmethod
    def use_blocks(self, num_blocks: int) -> None:
        """From now on run the first ``num_blocks`` blocks only."""

    @abstractmethod
    def loss(self, run: Callable[..., Any]) -> Tensor:
        """A forward pass with every block called through ``run(index, block, *args, **kwargs)``."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a training step occupies next to the weights and inputs that were there before.

    Attributes:
        after_forward: bytes on the device between forward and backward.
        peak: most bytes on the device in the whole step, gradients included.
        host: bytes in host memory between forward and backward.
    """

    after_forward: int
    peak: int
    host: int


class Meter(Protocol):
    """Measures the memory of a device while it is entered."""

    num_bytes: int
    peak_bytes: int

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def start(self) -> None:
        """Begin to measure: what is there now does not count."""

    def ignore(self, tensor: Tensor) -> None:
        """From now on ``tensor`` stands for host memory."""


def meter_for(device: torch.device) -> Meter:
    """Torch's own count on CUDA; elsewhere every storage is counted."""
    return CudaMeter() if device.type == "cuda" else CountingMeter()


class CudaMeter:
    """Memory of the current CUDA device, as torch's allocator counts it."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: Any) -> None: ...

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()

    @property
    def num_bytes(self) -> int:
        return torch.cuda.memory_allocated() - self._before

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before

    def ignore(self, tensor: Tensor) -> None: ...


class Method(Protocol):
    """A way to run the blocks of a model."""

    name: str

    def loss(self, subject: SeveralBlocks) -> Tensor:
        """The forward pass of ``subject``."""

    def host_bytes(self) -> int:
        """Bytes that the last forward pass put into host memory."""


class EngineMethod:
    """The blocks through an engine of their own.

    Args:
        name: of the row.
        policy: what happens to the blocks, or a function of their number that says it.
        subject: on whose device the engine works.
        meter: which must not count the host memory.
        skip_dead_ops: as in ``GradientEngine``.
    """

    def __init__(
        self,
        name: str,
        policy: BlockPolicy | Callable[[int], BlockPolicy],
        subject: TrainedModel,
        meter: Meter,
        *,
        skip_dead_ops: bool = True,
    ) -> None:
        self.name, self._policy = name, policy
        device = subject.device
        self.engine = GradientEngine(
            # Nothing is allocated on meta, so that no memory of this machine limits it.
            host_bytes=sys.maxsize if device.type == "meta" else None,
            backend=None if device.type == "cuda" else HostBackend(device, meter),
            policy=policy if isinstance(policy, BlockPolicy) else None,
            skip_dead_ops=skip_dead_ops,
            use_gradient_checkpointing=True,
            use_gradient_checkpointing_offload=True,
        )

    def loss(self, subject: SeveralBlocks) -> Tensor:
        policy = self._policy if isinstance(self._policy, BlockPolicy) else self._policy(subject.num_blocks)
        with gradient_engine(self.engine):
            run = block_runner(
                subject.num_blocks, True, True, policy=policy, unused_matmuls=subject.unused_matmuls
            )
            return subject.loss(run)

    def host_bytes(self) -> int:
        return self.engine.host_pool.num_bytes_lent


def measure_memory(subject: TrainedModel, method: Method, meter: Meter) -> Memory:
    """The memory of a method's second training step; in the first an engine learns what blocks share."""
    with meter:
        take_step(subject, method)
        meter.start()
        loss = method.loss(subject)
        after_forward, host = meter.num_bytes, method.host_bytes()
        subject.backward(loss)
        del loss
        peak = meter.peak_bytes
    subject.model.zero_grad(set_to_none=True)
    return Memory(after_forward=after_forward, peak=peak, host=host)


def take_turns(
    steps: Mapping[str, Callable[[], object]],
    *,
    num_warmup: int,
    num_rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each measured call of several, which take turns, so that noise hits all of them.

    Each turn begins with another one.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = deque(steps.items())
    for _ in range(num_warmup + num_rounds):
        for name, take in order:
            times[name].append(seconds_of(take, clock))
        order.rotate()
    return {name: seconds[num_warmup:] for name, seconds in times.items()}


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was measured of one way to run the blocks.

    Attributes:
        memory: of a step, by the number of blocks; empty if it did not fit.
        seconds: of a step with the most blocks; None if it was not timed.
        overlap: share of the time of copies between host and device in which a kernel ran; None if it was
            not measured.
    """

    memory: Mapping[int, Memory]
    seconds: float | None = None
    overlap: float | None = None

    @property
    def most(self) -> Memory:
        """The memory with the most blocks."""
        return self.memory[max(self.memory)]

    @property
    def block_bytes(self) -> float:
        """What one block more adds on the device between forward and backward."""
        few, many = min(self.memory), max(self.memory)
        return (self.memory[many].after_forward - self.memory[few].after_forward) / (many - few)


def measure(
    subject: SeveralBlocks,
    methods: Sequence[Method],
    meter: Meter,
    counts: Sequence[int],
    *,
    num_warmup: int,
    num_rounds: int,
) -> dict[str, Figures]:
    """The figures of every method, by its name.

    Args:
        subject: with as many blocks as the last of ``counts``.
        counts: numbers of blocks, ascending.
        num_warmup: steps before the measured ones.
        num_rounds: steps that are timed, of each method; none are on meta.
    """
    memories: dict[str, dict[int, Memory]] = {method.name: {} for method in methods}
    for count, method in product(counts, methods):
        subject.use_blocks(count)
        try:
            memories[method.name][count] = measure_memory(subject, method, meter)
        except torch.OutOfMemoryError:
            subject.model.zero_grad(set_to_none=True)
    fitting = [method for method in methods if len(memories[method.name]) == len(counts)]
    figures = {method.name: Figures(memory={}) for method in methods}
    figures |= {method.name: Figures(memory=memories[method.name]) for method in fitting}
    if subject.device.type == "meta":
        return figures
    steps = {method.name: partial(take_step, subject, method) for method in fitting}
    times = take_turns(steps, num_warmup=num_warmup, num_rounds=num_rounds)
    timed = {name: replace(figures[name], seconds=statistics.median(times[name])) for name in times}
    return figures | timed


def cells(heading: str, figures: Mapping[str, Figures]) -> list[dict[str, str]]:
    """The table: memory in MiB, and the time of a step as a ratio to that of the first row that has one."""
    reference = next((row.seconds for row in figures.values() if row.seconds), None)
    counts = sorted({count for row in figures.values() for count in row.memory})
    table = []
    for name, row in figures.items():
        line = {heading: name}
        for count in counts:
            memory = row.memory.get(count)
            line[f"{count} blocks"] = mebibytes(memory.after_forward) if memory else "out of memory"
        line["a block more"] = mebibytes(row.block_bytes) if row.memory else "-"
        line["peak"] = mebibytes(row.most.peak) if row.memory else "-"
        line["in host memory"] = mebibytes(row.most.host) if row.memory else "-"
        if reference is not None:
            line["ms a step"] = f"{row.seconds * 1000:.1f}" if row.seconds else "-"
            line["time"] = f"{row.seconds / reference:.3f}" if row.seconds else "-"
        table.append(line)
    return table


def take_step(subject: TrainedModel, method: Method) -> None:
    """Forward and backward; the gradients are dropped."""
    subject.backward(method.loss(subject))
    subject.model.zero_grad(set_to_none=True)


def seconds_of(call: Callable[[], object], clock: Callable[[], float]) -> float:
    """Seconds of one call, with the device idle before and after."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started_at = clock()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started_at


def print_table(title: str, rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows of cells by column, as a table that markdown reads too."""
    console = Console(width=1000, highlight=False)
    console.print(title)
    table = Table(box=MARKDOWN)
    for index, column in enumerate(rows[0]):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def mebibytes(num_bytes: float) -> str:
    """``num_bytes`` in MiB, with one decimal."""
    return f"{num_bytes / 2**20:,.1f}"
