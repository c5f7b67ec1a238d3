"""This file has torch compile blocks one by one, counts the graphs that come of it, and bounds their number.

A block's ``forward`` is compiled in its place, innermost: names of modules and parameters stay as they are,
and checkpointing, offload and streaming work around it. Blocks of one class whose weights have the same
shapes share their graphs.

All sizes of inputs are symbols from the first graph on, and two that are equal by chance are two symbols. As
torch does it by itself, the first graph has fixed sizes and later ones fewer, or the same symbol for both: a
block then fits several graphs, and its recompute may come to another one than its forward did (pytorch issue
166926). So which graph a block gets depends only on its call.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors
from diffsynth_lite.core.gradient.blocks import COMPILED
from diffsynth_lite.core.reports import CompileReport, IneffectiveSwitchError

_MAX_GRAPHS = 64
"""SDXL has the most diverse blocks: residual ones of 12 shapes and transformer ones of 2, called with inputs
that need a gradient or not, and with batches of one sample or of more."""

Graph = Callable[..., Any]
Backend = Callable[[torch.fx.GraphModule, list[Any]], Graph]


class BlockCompiler:
    """Compiles the ``forward`` of blocks when they first run with gradients, and counts what comes of it.

    Values and gradients differ from those of plain blocks in the last bits. Between compiled runs they do
    not: the recompute of a block runs the graph that its forward ran.

    Without gradients a block runs as it is: previews and losses on fixed noise are those of plain blocks, and
    there is no second graph for them.

    Args:
        blocks: to compile, before anything else is put around them. None compiles nothing.
        backend: name of one of torch's, which makes code of a graph.
        max_graphs: when there are as many, what fits none of them runs as it is.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], *, backend: str = "inductor", max_graphs: int = _MAX_GRAPHS
    ) -> None:
        self._num_blocks, self._max_graphs = len(blocks), max_graphs
        self._num_graphs = self._num_graph_runs = 0
        self._num_reported = self._num_runs_not_compiled = 0
        self._seconds = 0.0
        self._ran: set[int] = set()
        if not blocks:
            return
        self._breaks_before = _count_breaks()
        # One for all, since blocks share the graphs of one backend.
        counted = self._counting(torch._dynamo.lookup_backend(backend))
        for place, block in enumerate(blocks):
            self._wrap(block, place, torch.compile(block.forward, backend=counted, dynamic=True))

    @property
    def is_full(self) -> bool:
        """Whether there are as many graphs as there may be."""
        return self._num_graphs >= self._max_graphs

    def new_graphs(self) -> int:
        """How many graphs there are that an earlier call has not counted."""
        new, self._num_reported = self._num_graphs - self._num_reported, self._num_graphs
        return new

    def report(self) -> CompileReport:
        """What was compiled, and how many blocks ran so."""
        if not self._num_blocks:
            return CompileReport()
        return CompileReport(
            blocks_compiled=len(self._ran),
            graphs_compiled=self._num_graphs,
            graph_breaks=_count_breaks() - self._breaks_before,
            block_runs_not_compiled=self._num_runs_not_compiled,
            compile_seconds=self._seconds,
        )

    def require_effect(self, switch: str = "compile") -> None:
        """Check that blocks ran compiled, where some are to."""
        if self._num_blocks and not self._ran:
            raise IneffectiveSwitchError(
                f"{switch}: on, but none of {self._num_blocks} blocks ran compiled: the model does not call "
                "them, or not by their forward, or torch could make no graph of it"
            )

    def _counting(self, compile_graph: Backend) -> Backend:
        """The backend, with its graphs and their runs counted."""

        def compile_and_count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Graph:
            compiled = compile_graph(graph, inputs)
            self._num_graphs += 1

            def run(*inputs: Any) -> Any:
                self._num_graph_runs += 1
                return compiled(*inputs)

            return run

        return compile_and_count

    def _wrap(self, block: nn.Module, place: int, compiled: Callable[..., Any]) -> None:
        plain = block.forward

        def forward(_block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            for value in vars(block).values():
                # A streamed weight of the block itself is a plain tensor, as inputs are.
                if type(value) is Tensor:
                    torch._dynamo.mark_static(value)
            tensors, template = take_tensors((args, kwargs))
            args, kwargs = put_tensors(template, [_unshared(tensor) for tensor in tensors])
            with self._watched(place), _symbolic_sizes(self._max_graphs, only_known=self.is_full):
                return compiled(*args, **kwargs)

        # A bound method, as it was before: others ask it for its module.
        vars(block).update({"forward": MethodType(forward, block), COMPILED: True})

    @contextmanager
    def _watched(self, place: int) -> Iterator[None]:
        """Scope of one run of a block, which counts."""
        graphs_before, runs_before, started_at = self._num_graphs, self._num_graph_runs, time.perf_counter()
        try:
            yield
        finally:
            # A recompute ends by an exception when it has given all that backward needs.
            if self._num_graphs > graphs_before:
                self._seconds += time.perf_counter() - started_at
            if self._num_graph_runs > runs_before:
                self._ran.add(place)
            else:
                self._num_runs_not_compiled += 1


def _unshared(tensor: Tensor) -> Tensor:
    """A tensor of the same memory, neither a view nor at an offset in its storage.

    Graphs are for these, too, and a recompute gets its inputs without bases, or from host memory.
    """
    is_unshared = tensor._base is None and not tensor.storage_offset()
    if is_unshared or type(tensor) is not Tensor or tensor.is_conj() or tensor.is_neg():
        return tensor
    unshared: Tensor = _Unshared.apply(tensor)  # type: ignore[no-untyped-call]
    return unshared


class _Unshared(torch.autograd.Function):
    """The identity, for views."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        start = tensor.storage_offset() * tensor.itemsize
        if not start:
            return tensor.detach()
        memory: Any = tensor.untyped_storage()[start:]
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory, 0, tensor.shape, tensor.stride())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def require_compiler(device: torch.device) -> None:
    """Check that there is what makes code of graphs for a device.

    Raises:
        ValueError: there is not; the message says what to install.
    """
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError:
            raise ValueError(
                "needs a C++ compiler, and none works here: install one (Ubuntu: apt install g++), or set it "
                "to off"
            ) from None
    elif device.type != "cuda":
        raise ValueError(f"is for the CPU and CUDA devices, not for {device.type}: set it to off")
    elif not has_triton():
        raise ValueError(
            "needs triton, which is not installed or does not know this GPU: pip install triton, or set it "
            "to off"
        )


@contextmanager
def _symbolic_sizes(max_graphs: int, *, only_known: bool) -> Iterator[None]:
    """Scope of one run of a block, with the settings of the compiler that graphs of blocks need.

    They are of the thread: backward, and recomputes with it, runs on others.
    """
    # Here: what does not compile need not wait for it.
    from torch.fx.experimental import _config as shape_settings

    settings = torch._dynamo.config
    limit = "recompile_limit" if hasattr(settings, "recompile_limit") else "cache_size_limit"
    with ExitStack() as scopes:
        # Past its own limit torch would continue with plain blocks, and only warn of it.
        # DDP would have a block cut where its buckets of gradients end; each has few.
        scopes.enter_context(settings.patch({limit: max_graphs + 1, "optimize_ddp": False}))
        scopes.enter_context(shape_settings.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        if only_known:
            scopes.enter_context(torch.compiler.set_stance("eager_on_recompile"))
        yield


def _count_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())
