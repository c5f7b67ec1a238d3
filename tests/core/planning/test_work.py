"""The work that is counted is what the step does, and that of a few blocks says that of all."""

import sys
from collections import Counter

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
    GradientReport,
    block_runner,
    gradient_engine,
)
from diffsynth_lite.core.planning import (
    ON_CUDA,
    FusedKernels,
    HostBackend,
    Kernel,
    MeteredFormat,
    Repeat,
    StepWork,
    WorkMeter,
    backward_in_scope,
    count_work,
)
from diffsynth_lite.core.weights import FrozenLinear, Int8

META, CPU = torch.device("meta"), torch.device("cpu")
FP32 = torch.float32
TOKENS, WIDTH, HEADS = 8, 256, 4
ROWS, WEIGHT = TOKENS * WIDTH * FP32.itemsize, WIDTH * WIDTH * FP32.itemsize
PRODUCT = Kernel("product", FP32, 2 * TOKENS * WIDTH * WIDTH, 2 * ROWS + WEIGHT)
SAVED = BlockStrategy(save_attention="park")


class Block(nn.Module):
    """A scale that trains, attention, and a frozen layer and gate; no gradient needs the layer's result."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, device=device))
        self.gate = nn.Parameter(torch.ones(WIDTH, device=device), requires_grad=False)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False, device=device).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * self.scale).view(1, TOKENS, HEADS, -1).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(heads, heads, heads)
        return x + self.gate * self.layer(attended.transpose(1, 2).reshape(TOKENS, WIDTH))


def counted(
    num_blocks: int,
    strategy: BlockStrategy,
    *repeats: Repeat,
    device: torch.device = META,
    skip_dead_ops: bool = True,
    trains_gates: bool = False,
    is_first: bool = False,
) -> tuple[StepWork, GradientReport]:
    """The work of a second step, or the first one, and what its engine says of it."""
    meter = WorkMeter()
    engine = GradientEngine(
        min_bytes=0,
        host_bytes=sys.maxsize,
        backend=HostBackend(device, meter),
        skip_dead_ops=skip_dead_ops,
    )
    blocks = nn.ModuleList(Block(device) for _ in range(num_blocks))
    for block in blocks:
        block.gate.requires_grad_(trains_gates)
    x = torch.zeros(TOKENS, WIDTH, device=device)

    def loss() -> Tensor:
        with gradient_engine(engine), FusedKernels(ON_CUDA):
            run = block_runner(
                num_blocks, True, True, policy=BlockPolicy(selected=strategy), unused_matmuls=("layer",)
            )
            hidden = x
            for place, block in enumerate(blocks):
                hidden = run(place, block, hidden)
        return hidden.sum()

    def backward(value: Tensor) -> None:
        with FusedKernels(ON_CUDA):
            backward_in_scope(value)

    if not is_first:
        backward(loss())
    engine.start_report()
    work = count_work(loss, backward, list(blocks), meter, repeats=repeats)
    return work, engine.report()


def attention_of(kernels: Counter[Kernel]) -> dict[str, int]:
    return {kernel.kind: kernel.flops for kernel in kernels if kernel.kind.startswith("attention")}


def test_each_kernel_counts_with_what_it_reads_writes_and_computes() -> None:
    work, _ = counted(3, KEEP)
    _, middle, last = work.blocks
    pairs = 2 * TOKENS * TOKENS * WIDTH
    scaled = Kernel("other", FP32, 0, 2 * ROWS + WIDTH * FP32.itemsize)
    added = Kernel("other", FP32, 0, 3 * ROWS)
    logarithms = HEADS * TOKENS * FP32.itemsize
    attention = Kernel("attention", FP32, 2 * pairs, 4 * ROWS + logarithms)
    expected = Counter([scaled, attention, PRODUCT, scaled, added])
    assert middle.forward == expected
    # The loss follows the last one.
    assert last.forward == expected + Counter([Kernel("other", FP32, 0, ROWS + FP32.itemsize)])
    assert attention_of(middle.backward) == {"attention backward": 5 * pairs}
    assert middle.backward[PRODUCT] == 1
    assert not middle.recompute
    assert not middle.sent


@pytest.mark.parametrize("strategy", [KEEP, RECOMPUTE, OFFLOAD, SAVED], ids=["keep", "again", "off", "saved"])
def test_four_blocks_do_what_ten_do(strategy: BlockStrategy) -> None:
    few, _ = counted(4, strategy, Repeat(first=2, num_blocks=1, num_left_out=6))
    whole, _ = counted(10, strategy)
    assert few == whole


def test_a_recompute_does_what_the_forward_pass_did_but_for_what_is_saved_and_what_nobody_needs() -> None:
    kept, all_again, again, saved = (
        counted(3, strategy, skip_dead_ops=skips)[0].blocks[1]
        for strategy, skips in ((KEEP, True), (RECOMPUTE, False), (RECOMPUTE, True), (SAVED, False))
    )
    assert kept.forward == all_again.forward == again.forward == saved.forward
    # Once the gate is saved backward has all that it needs: the product with it, and the sum, are left out.
    left_out = kept.forward - all_again.recompute
    assert [kernel.kind for kernel in left_out.elements()] == ["other", "other"]
    assert all_again.recompute - again.recompute == Counter([PRODUCT])
    (attention,) = (kernel for kernel in kept.forward if kernel.kind == "attention")
    assert all_again.recompute - saved.recompute == Counter([attention])
    assert kept.backward == again.backward == saved.backward


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_a_product_that_is_asked_for_after_all_counts_in_the_recompute(is_first: bool) -> None:
    skips, does_all = (
        counted(3, RECOMPUTE, skip_dead_ops=skips, trains_gates=True, is_first=is_first)[0].blocks[1]
        for skips in (True, False)
    )
    assert skips == does_all
    assert skips.recompute[PRODUCT] == 1


def test_bytes_over_the_bus_are_those_of_a_real_step() -> None:
    both = BlockStrategy(offload=True, save_attention="park")
    real, report = counted(5, both, device=CPU)
    on_meta, _ = counted(5, both)
    for work in (real, on_meta):
        assert sum(sent.num_bytes for block in work.blocks for sent in block.sent) == report.bytes_offloaded
        sizes = [sum(sent.num_bytes for sent in block.sent) for block in work.blocks]
        # The last one's are still on the device, and the others are fetched one block ahead.
        fetched = [block.num_bytes_fetched for block in work.blocks]
        assert fetched == [0, *sizes[:-1]]
        inputs, *attention = work.blocks[1].sent
        assert (inputs.num_bytes, inputs.after) == (ROWS, Counter())
        assert all(sent.after for sent in attention)
        assert sum(sent.num_bytes for sent in attention) * 5 == report.attention_bytes_offloaded


def test_a_weight_that_is_made_again_is_read_in_its_format_and_written_once() -> None:
    layer = FrozenLinear(nn.Linear(WIDTH, WIDTH, device=META), Int8(), META)
    meter = WorkMeter()
    meter.begin("before")
    with meter, MeteredFormat.in_layers_of(layer, meter):
        layer(torch.empty(TOKENS, WIDTH, device=META))
    made = Kernel("dequantise", FP32, 0, WIDTH * WIDTH + WIDTH * FP32.itemsize + WEIGHT)
    assert meter.kernels("before")[made] == 1
