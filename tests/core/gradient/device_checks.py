"""Checks of offloading for any device: with CUDA's streams, and on the CPU with backends that pretend."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    SaveAttention,
    block_runner,
    gradient_checkpoint_forward,
    gradient_engine,
)
from diffsynth_lite.core.transfer.backends import Backend
from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear
from diffsynth_lite.core.weights.stream import WeightStream

NUM_BLOCKS = 8
CHANNELS = 1024
BYTES_PER_ROW = 4 * CHANNELS


class Block(nn.Module):
    """Drops half of its input, in place of a LoRA's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(CHANNELS))

    def forward(self, *, hidden_states: Tensor, shared: dict[str, Tensor]) -> Tensor:
        dropped = nn.functional.dropout(hidden_states * shared["temb"], 0.5)
        return (dropped * self.scale).sin()


class Stack:
    """Blocks called with keywords only, and their inputs, built before anything is measured."""

    def __init__(self, device: str, num_rows: int) -> None:
        self.blocks = [Block().to(device) for _ in range(NUM_BLOCKS)]
        self.inputs = torch.rand(num_rows, CHANNELS, device=device)
        self.shared = {"temb": torch.ones(CHANNELS, device=device)}

    def forward(self, flags: tuple[bool, bool]) -> Tensor:
        torch.manual_seed(0)
        x = self.inputs * 1
        for block in self.blocks:
            x = gradient_checkpoint_forward(block, *flags, hidden_states=x, shared=self.shared)
        return x

    def gradients(self, flags: tuple[bool, bool]) -> list[Tensor]:
        loss = self.forward(flags).sum()
        return list(torch.autograd.grad(loss, [block.scale for block in self.blocks]))


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def check_flags(device: str, num_rows: int, flags: tuple[bool, bool]) -> None:
    """The recompute draws the dropout masks of the forward pass."""
    stack = Stack(device, num_rows)
    assert equal(stack.gradients(flags), stack.gradients((False, False)))


def check_offload(
    device: str, num_rows: int, *, resident: int, prefetched: int, backend: Backend | None
) -> None:
    """Three steps give the gradients of a plain one, and leave nothing behind."""
    stack = Stack(device, num_rows)
    reference = stack.gradients((False, False))
    engine = GradientEngine(0, None, resident, prefetched, backend)
    with gradient_engine(engine):
        for _ in range(3):
            engine.start_report()
            assert equal(stack.gradients((True, True)), reference)
    report = engine.report()
    assert report.bytes_offloaded == NUM_BLOCKS * num_rows * BYTES_PER_ROW
    late = NUM_BLOCKS - resident if prefetched == 0 else max(1 - resident, 0)
    assert report.late_prefetches == late
    assert engine.host_pool.num_bytes_lent == 0


def check_refused(device: str, backend: Backend) -> None:
    """Where the system gives no memory that copies are fast from, everything stays and is counted."""
    stack, engine = Stack(device, 64), GradientEngine(backend=backend)
    reference = stack.gradients((False, False))
    with gradient_engine(engine):
        assert equal(stack.gradients((True, True)), reference)
    report = engine.report()
    left = report.not_offloaded["host memory refused by the system"]
    assert (report.tensors_offloaded, report.blocks_recomputed) == (0, NUM_BLOCKS)
    # In the first step what all blocks share is not known before the second block.
    assert left.num_bytes >= NUM_BLOCKS * 64 * BYTES_PER_ROW


def check_full(device: str, num_rows: int, backend: Backend | None) -> None:
    """Where the host memory allowed is used up, the rest stays and is counted."""
    stack, size = Stack(device, num_rows), num_rows * BYTES_PER_ROW
    reference = stack.gradients((False, False))
    engine = GradientEngine(BYTES_PER_ROW + 1, 3 * size, backend=backend)
    with gradient_engine(engine):
        assert equal(stack.gradients((True, True)), reference)
    report = engine.report()
    assert (report.tensors_offloaded, report.bytes_offloaded) == (3, 3 * size)
    assert report.not_offloaded["host memory full"].num_bytes == (NUM_BLOCKS - 3) * size


class AttentionBlock(nn.Module):
    """Attention with dropout after it, then a product that nothing needs."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.last = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 16)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(2)
        return x + self.gate * self.last(nn.functional.dropout(attended, 0.5).sin())


def check_savings(
    device: str,
    num_tokens: int,
    *,
    save_attention: SaveAttention,
    offload: bool,
    make_backend: Callable[[], Any] | None,
) -> None:
    """Saved attention and skipped products change no bit."""
    policy = BlockPolicy(selected=BlockStrategy(offload=True, save_attention=save_attention))
    engine = GradientEngine(policy=policy, backend=make_backend() if make_backend else None)
    torch.manual_seed(0)
    blocks = [AttentionBlock().to(device, torch.bfloat16) for _ in range(3)]
    inputs = torch.randn(2, num_tokens, 64, device=device, dtype=torch.bfloat16)

    def gradients(checkpointing: bool) -> list[Tensor]:
        torch.manual_seed(1)
        x = inputs
        with gradient_engine(engine):
            run = block_runner(3, checkpointing, checkpointing and offload, unused_matmuls=["last"])
            for index, block in enumerate(blocks):
                x = run(index, block, x)
        return list(torch.autograd.grad(x.float().square().sum(), [block.query.weight for block in blocks]))

    assert equal(gradients(True), gradients(False))
    report = engine.report()
    assert (report.attention_saved, report.attention_not_saved) == (3, 0)
    assert (report.attention_bytes_offloaded > 0) == (save_attention == "park")
    assert report.dead_ops_skipped == 3


class FrozenBlock(nn.Module):
    """A frozen layer, something after it that trains, and a quantised layer, which backward meets first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(CHANNELS))
        last = nn.Linear(CHANNELS, 64, bias=False)
        self.last = FrozenLinear(last, Int8(), last.weight.device)
        self.last.write(last.weight.detach(), 0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last((self.layer(x) * self.scale).sin()).repeat(1, CHANNELS // 64)


def check_stream(
    device: str, num_rows: int, *, flags: tuple[bool, bool], num_slots: int, backend: Backend
) -> None:
    """Weights in host memory give the gradients of resident ones, next to inputs that are offloaded."""
    torch.manual_seed(0)
    blocks = [FrozenBlock().to(device) for _ in range(NUM_BLOCKS)]
    inputs = torch.rand(num_rows, CHANNELS, device=device)
    engine = GradientEngine(0, backend=backend)

    def gradients() -> list[Tensor]:
        x = inputs
        with gradient_engine(engine):
            for block in blocks:
                x = gradient_checkpoint_forward(block, *flags, x)
        return list(torch.autograd.grad(x.square().sum(), [block.scale for block in blocks]))

    reference = gradients()
    stream = WeightStream([blocks], torch.device(device), num_slots=num_slots, backend=backend)
    for _ in range(3):
        stream.start_report()
        assert equal(gradients(), reference)
    report = stream.report()
    assert report.weight_copies == 2 * (NUM_BLOCKS - num_slots)
    # Without a second slot nothing can be fetched ahead.
    assert report.late_weight_copies == (report.weight_copies if num_slots == 1 else 0)
    assert engine.host_pool.num_bytes_lent == 0
