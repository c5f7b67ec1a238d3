"""Processes that share a model's parameters (FSDP2) get the same gradients when its blocks are offloaded."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lazy_backend import LazyBackend
from processes import NUM_RANKS, on_ranks
from test_gradient_ddp import Stack, equal
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from diffsynth_lite.core.gradient import (
    GradientEngine,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)


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


def train_on_a_rank(rank: int, folder: Path) -> None:
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
    on_ranks(train_on_a_rank, tmp_path)
    for rank in range(NUM_RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert [equal(gradients, found["plain"]) for gradients in found["offloaded"]] == [True, True]
        assert [report["tensors_offloaded"] for report in found["reports"]] == [6, 6]
        assert found["lent"] == [0, 0]
