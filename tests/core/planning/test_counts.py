"""A few blocks stand for all: which these are, and that a step of them says what a step of all takes."""

import sys

import pytest
import torch
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
from diffsynth_lite.core.planning.counts import Repeat, StepBytes, count_step, fewer_blocks
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
) -> StepBytes:
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
