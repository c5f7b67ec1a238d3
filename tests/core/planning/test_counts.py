"""A few blocks stand for all: which these are, what a step computes, and that a few say what all take."""

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

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
from diffsynth_lite.core.planning.counts import Repeat, StepCost, count_step, fewer_blocks
from diffsynth_lite.core.planning.kernels import ON_CUDA, FusedKernels, backward_in_scope
from diffsynth_lite.core.planning.meters import CountingMeter, HostBackend

META = torch.device("meta")
KIB = 1024


@pytest.mark.parametrize(
    ("kinds", "kept", "repeats"),
    [
        ("aaaa", [0, 1, 2, 3], []),
        ("aaaaaaa", [0, 1, 2, 3], [(2, 1, 3)]),
        ("baaaaaac", [0, 1, 2, 3, 4, 7], [(3, 1, 2)]),
        ("ababababababab", [0, 1, 2, 3, 4, 5, 6, 7], [(4, 2, 3)]),
        ("aaaaabbbbbb", [0, 1, 2, 3, 5, 6, 7, 8], [(2, 1, 1), (6, 1, 2)]),
        ("abcabd", [0, 1, 2, 3, 4, 5], []),
    ],
)
def test_four_of_what_repeats_itself_are_kept_and_the_third_stands_for_the_rest(
    kinds: str, kept: list[int], repeats: list[tuple[int, int, int]]
) -> None:
    expected = [Repeat(first=first, num_blocks=blocks, num_left_out=out) for first, blocks, out in repeats]
    assert fewer_blocks(kinds, 1) == (kept, expected)


class Block(nn.Module):
    """Keeps its input and what exp returns, of 1 KiB each; its weight has a gradient of as much."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(256, device=META))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).exp().sin()


def counted(
    blocks: nn.ModuleList, policy: BlockPolicy, *repeats: Repeat, num_neighbours: int = 1
) -> StepCost:
    meter = CountingMeter()
    backend = HostBackend(META, meter)
    engine = GradientEngine(
        min_bytes=0,
        host_bytes=sys.maxsize,
        resident_blocks=num_neighbours,
        prefetched_blocks=num_neighbours,
        backend=backend,
    )
    x = torch.empty(256, device=META)

    def loss() -> Tensor:
        with gradient_engine(engine):
            run, hidden = block_runner(len(blocks), True, True, policy=policy), x
            for place, block in enumerate(blocks):
                hidden = run(place, block, hidden)
        return hidden.sum()

    loss().backward()
    blocks.zero_grad()
    return count_step(loss, Tensor.backward, list(blocks), meter, engine).stretched(repeats)


@pytest.mark.parametrize(
    ("selected", "kept", "host"),
    [(KEEP, 19, 0), (RECOMPUTE, 9, 0), (OFFLOAD, 1, 10)],
    ids=["keep", "re", "off"],
)
def test_four_blocks_take_what_ten_do(selected: BlockStrategy, kept: int, host: int) -> None:
    policy = BlockPolicy(selected=selected)
    whole = counted(nn.ModuleList(Block() for _ in range(10)), policy)
    few = counted(
        nn.ModuleList(Block() for _ in range(4)), policy, Repeat(first=2, num_blocks=1, num_left_out=6)
    )
    assert few == whole
    # The first input is there before, but goes to the host, too; the loss is a number.
    assert (whole.kept - 4, whole.host) == (kept * KIB, host * KIB)
    assert whole.peak >= 10 * KIB  # all gradients


def test_blocks_that_are_kept_after_others_that_are_offloaded_take_what_they_do_in_the_whole_model() -> None:
    first_five, first_four = (BlockPolicy(select="first_k", n=n) for n in (5, 4))
    whole = counted(nn.ModuleList(Block() for _ in range(12)), first_five)
    repeats = (Repeat(first=2, num_blocks=1, num_left_out=1), Repeat(first=6, num_blocks=1, num_left_out=3))
    assert counted(nn.ModuleList(Block() for _ in range(8)), first_four, *repeats) == whole


def test_more_blocks_are_counted_where_more_are_on_the_device_at_once() -> None:
    policy = BlockPolicy(selected=OFFLOAD)
    kept, repeats = fewer_blocks("a" * 12, 3)
    assert len(kept) == 8
    few = counted(nn.ModuleList(Block() for _ in kept), policy, *repeats, num_neighbours=3)
    assert few == counted(nn.ModuleList(Block() for _ in range(12)), policy, num_neighbours=3)


TOKENS, WIDTH, HEADS = 8, 256, 4
PRODUCT, PAIRS = 2 * TOKENS * WIDTH**2, 2 * TOKENS**2 * WIDTH


class Attending(nn.Module):
    """A scale that trains, attention, and a frozen layer and gate; no gradient needs the layer's result."""

    def __init__(self, *, trains_gates: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(WIDTH, device=META))
        self.gate = nn.Parameter(torch.empty(WIDTH, device=META), requires_grad=trains_gates)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False, device=META).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * self.scale).view(1, TOKENS, HEADS, -1).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads)
        return x + self.gate * self.layer(attended.transpose(1, 2).reshape(TOKENS, WIDTH))


@pytest.mark.parametrize(
    ("strategy", "skip_dead_ops", "trains_gates", "again"),
    [
        (KEEP, True, False, 0),
        (RECOMPUTE, False, False, 2 * PAIRS + PRODUCT),
        # The frozen gate needs no result of the layer.
        (RECOMPUTE, True, False, 2 * PAIRS),
        # A product that waits and is asked for after all counts, too.
        (RECOMPUTE, True, True, 2 * PAIRS + PRODUCT),
        (BlockStrategy(save_attention="park"), False, False, PRODUCT),
    ],
)
def test_a_step_computes_products_and_attention_and_again_what_is_neither_saved_nor_unneeded(
    strategy: BlockStrategy, skip_dead_ops: bool, trains_gates: bool, again: int
) -> None:
    blocks = nn.ModuleList(Attending(trains_gates=trains_gates) for _ in range(4))
    meter = CountingMeter()
    backend = HostBackend(META, meter)
    engine = GradientEngine(min_bytes=0, host_bytes=sys.maxsize, backend=backend, skip_dead_ops=skip_dead_ops)

    def loss() -> Tensor:
        hidden = torch.empty(TOKENS, WIDTH, device=META)
        policy = BlockPolicy(selected=strategy)
        with gradient_engine(engine), FusedKernels(ON_CUDA):
            run = block_runner(len(blocks), True, True, policy=policy, unused_matmuls=("layer",))
            for place, block in enumerate(blocks):
                hidden = run(place, block, hidden)
        return hidden.sum()

    def backward(value: Tensor) -> None:
        with FusedKernels(ON_CUDA):
            backward_in_scope(value)

    step = count_step(loss, backward, list(blocks), meter, engine)
    for num_blocks, repeats in ((4, []), (10, [Repeat(first=2, num_blocks=1, num_left_out=6)])):
        cost = step.stretched(repeats)
        assert cost.forward.attention_flops == num_blocks * 2 * PAIRS
        assert cost.forward.flops == num_blocks * (2 * PAIRS + PRODUCT)
        # Of the frozen layer only the gradient of its input is computed; attention has five products.
        assert cost.backward.flops == num_blocks * (5 * PAIRS + PRODUCT + again)
