"""Two processes synchronise the same gradients under all switches."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lazy_backend import LazyBackend
from processes import NUM_RANKS, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diffsynth_lite.core.gradient import (
    GradientEngine,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)
from diffsynth_lite.core.weights import WeightStream

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


def train_on_a_rank(rank: int, folder: Path) -> None:
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
    on_ranks(train_on_a_rank, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(NUM_RANKS))
    assert equal(first["mean"], first["plain"])
    assert equal(first["plain"], second["plain"])
    assert len(first["with flags"]) == 2 * len(ALL_FLAGS) + 4 + 2 * len(ALL_FLAGS)
    for one, other in zip(first["with flags"], second["with flags"], strict=True):
        assert equal(one, first["plain"])
        assert equal(other, first["plain"])
