"""Checkpointing, offload and policies under DDP and FSDP2 change no bit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lazy_backend import LazyBackend
from processes import NUM_RANKS, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diffsynth_lite.core.gradient import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    block_runner,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)
from diffsynth_lite.core.weights.stream import WeightStream

ALL_FLAGS = [(False, False), (True, False), (False, True), (True, True)]


class Stack(nn.Module):
    """Blocks with dropout and a frozen part, called as diffusers does, whose import would take seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        torch.manual_seed(0)
        frozen = [nn.Linear(8, 8).requires_grad_(False) for _ in range(3)]
        self.blocks = nn.ModuleList(
            nn.Sequential(f, nn.Dropout(0.3), nn.Linear(8, 8), nn.GELU()) for f in frozen
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self._gradient_checkpointing_func(block, x) if self.gradient_checkpointing else block(x)
        return x


def gradients_of_a_step(model: nn.Module, x: Tensor, flags: tuple[bool, bool] | None) -> list[Tensor]:
    def run(index: int, block: nn.Module, *args: Any) -> Any:
        return gradient_checkpoint_forward(block, *flags, *args)

    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with intercept_blocks(model, run) if flags else nullcontext():
        loss = model(x).square().mean()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.requires_grad]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def train_with_ddp(rank: int, folder: Path) -> None:
    """Save the mean over the ranks of the gradients without DDP, and those of DDP without and with flags.

    The last ones are those of a model whose frozen weights live in host memory.
    """
    x = torch.linspace(-1, 1, 32).reshape(4, 8) * (rank + 1)
    mean = gradients_of_a_step(Stack(), x, None)
    for gradient in mean:
        dist.all_reduce(gradient)
        gradient /= NUM_RANKS
    model = DistributedDataParallel(Stack(), find_unused_parameters=False)
    plain = gradients_of_a_step(model, x, None)
    # Twice each: DDP finds a missing gradient at the beginning of the next step.
    with_flags = [gradients_of_a_step(model, x, flags) for flags in ALL_FLAGS for _ in range(2)]
    for settings in ({"find_unused_parameters": True}, {"static_graph": True}):
        model = DistributedDataParallel(Stack(), **settings)
        with gradient_engine(GradientEngine()):
            with_flags += [gradients_of_a_step(model, x, (True, True)) for _ in range(2)]
    streamed, backend = Stack(), LazyBackend()
    stream = WeightStream([list(streamed.blocks)], torch.device("cpu"), backend=backend)
    model = DistributedDataParallel(streamed)
    with gradient_engine(GradientEngine(backend=backend)):
        with_flags += [gradients_of_a_step(model, x, flags) for flags in ALL_FLAGS for _ in range(2)]
    assert stream.report().weight_copies > 0
    torch.save({"mean": mean, "plain": plain, "with flags": with_flags}, folder / f"rank{rank}.pt")


def test_gradients_under_ddp_depend_neither_on_the_flags_nor_on_where_weights_are(
    tmp_path: Path,
) -> None:
    on_ranks(train_with_ddp, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(NUM_RANKS))
    assert equal(first["mean"], first["plain"])
    assert equal(first["plain"], second["plain"])
    assert len(first["with flags"]) == 2 * len(ALL_FLAGS) + 4 + 2 * len(ALL_FLAGS)
    for one, other in zip(first["with flags"], second["with flags"], strict=True):
        assert equal(one, first["plain"])
        assert equal(other, first["plain"])


def sharded_gradients(engine: GradientEngine | None, x: Tensor) -> list[Tensor]:
    """Gradients of two accumulated passes, whole."""
    model = Stack()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def run(index: int, block: nn.Module, *args: Any) -> Any:
        return gradient_checkpoint_forward(block, True, True, *args)

    torch.manual_seed(1)
    for _ in range(2):
        with gradient_engine(engine) if engine else nullcontext():
            with intercept_blocks(model, run) if engine else nullcontext():
                loss = model(x).square().mean()
            loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    return [gradient.full_tensor() for gradient in gradients]


def train_with_fsdp(rank: int, folder: Path) -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8) * (rank + 1)
    engines = [GradientEngine(), GradientEngine(backend=LazyBackend())]
    plain = sharded_gradients(None, x)
    offloaded = [sharded_gradients(engine, x) for engine in engines]
    reports = [engine.report().metrics() for engine in engines]
    lent = [engine.host_pool.num_bytes_lent for engine in engines]
    torch.save(
        {"plain": plain, "offloaded": offloaded, "reports": reports, "lent": lent}, folder / f"{rank}.pt"
    )


def test_gradients_of_a_sharded_model_do_not_depend_on_offloading(tmp_path: Path) -> None:
    on_ranks(train_with_fsdp, tmp_path)
    for rank in range(NUM_RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert [equal(gradients, found["plain"]) for gradients in found["offloaded"]] == [True, True]
        assert [report["tensors_offloaded"] for report in found["reports"]] == [6, 6]
        assert found["lent"] == [0, 0]


STRATEGIES = [
    OFFLOAD,
    BlockStrategy(offload=True, save_attention="park"),
    BlockStrategy(save_attention="keep"),
    RECOMPUTE,
    KEEP,
]
NUM_MICRO_BATCHES = 2


class OneForEachBlock(BlockPolicy):
    """Every strategy once."""

    def strategy(self, index: int, num_blocks: int) -> BlockStrategy:
        return STRATEGIES[index]


class AttentionBlock(nn.Module):
    """Attention, dropout, and a frozen product that nothing in backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.last = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(2)
        return x + self.gate * self.last(nn.functional.dropout(attended, 0.3).sin())


def stack() -> Stack:
    model = Stack()
    torch.manual_seed(0)
    model.blocks = nn.ModuleList(AttentionBlock() for _ in STRATEGIES)
    return model


def with_ddp(**settings: bool) -> tuple[nn.Module, Callable[[], AbstractContextManager[None]]]:
    """A model, and a scope in which its processes do not exchange gradients."""
    model = stack()
    if settings.get("find_unused_parameters"):
        model.unused = nn.Parameter(torch.ones(3))
    ddp = DistributedDataParallel(model, **settings)
    return ddp, ddp.no_sync


def with_fsdp() -> tuple[nn.Module, Callable[[], AbstractContextManager[None]]]:
    """The same for sharded parameters."""
    model, mesh = stack(), init_device_mesh("cpu", (NUM_RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, nullcontext


WRAPPERS: dict[str, Callable[[], Any]] = {
    "ddp": partial(with_ddp, find_unused_parameters=False),
    "ddp, unused parameters": partial(with_ddp, find_unused_parameters=True),
    "ddp, static graph": partial(with_ddp, static_graph=True),
    "fsdp": with_fsdp,
}


def gradients_of_steps(make: Callable[[], Any], engine: GradientEngine | None, x: Tensor) -> list[Tensor]:
    """Gradients after each of two steps of two micro-batches, the first of which is not synchronised."""
    model, no_sync = make()
    torch.manual_seed(1)
    gradients = []
    for step in range(2):
        model.zero_grad(set_to_none=True)
        for place in range(NUM_MICRO_BATCHES):
            # DDP takes a graph for static from the first pass on, which it must see whole.
            is_apart = place < NUM_MICRO_BATCHES - 1 and (step or not getattr(model, "static_graph", False))
            with no_sync() if is_apart else nullcontext(), gradient_engine(engine or GradientEngine()):
                run = block_runner(
                    len(STRATEGIES), engine is not None, engine is not None, unused_matmuls=["last"]
                )
                with intercept_blocks(model, run):
                    loss = model(x * (place + 1)).square().mean()
                loss.backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradients += [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in found]
    return gradients


def train_under_policies(rank: int, folder: Path) -> None:
    x = torch.linspace(-1, 1, 64).reshape(2, 4, 8) * (rank + 1)
    results = {}
    for name, make in WRAPPERS.items():
        engines = [
            GradientEngine(policy=OneForEachBlock(), backend=backend) for backend in (None, LazyBackend())
        ]
        plain = gradients_of_steps(make, None, x)
        treated = [gradients_of_steps(make, engine, x) for engine in engines]
        results[name] = {
            "plain": plain,
            "equal": [equal(each, plain) for each in treated],
            "reports": [engine.report().metrics() for engine in engines],
            "lent": [engine.host_pool.num_bytes_lent for engine in engines],
        }
    torch.save(results, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, by wrapper."""
    folder = tmp_path_factory.mktemp("processes")
    on_ranks(train_under_policies, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_policy_of_all_strategies_changes_no_gradient(results: list[dict[str, Any]], name: str) -> None:
    first, second = (result[name] for result in results)
    assert equal(first["plain"], second["plain"])
    assert any(gradient.any() for gradient in first["plain"])
    for found in (first, second):
        assert found["equal"] == [True, True]
        assert found["lent"] == [0, 0]


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_policy_is_what_the_processes_did(results: list[dict[str, Any]], name: str) -> None:
    passes = 2 * NUM_MICRO_BATCHES
    for report in (report for result in results for report in result[name]["reports"]):
        assert (report["blocks_run"], report["blocks_recomputed"]) == (5 * passes, 4 * passes)
        assert report["attention_saved"] == 2 * passes
        assert report["attention_bytes_offloaded"] > 0
        assert report["dead_ops_skipped"] == 4 * passes
        assert report["tensors_offloaded"] > report["tensors_not_offloaded_host_full"] == 0
