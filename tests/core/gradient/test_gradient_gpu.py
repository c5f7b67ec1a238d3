"""On a CUDA device dropout draws the same mask again, and parked inputs do not add up."""

import pytest
import torch
from gradient_models import ALL_FLAGS
from torch import Tensor, nn

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    GradientEngine,
    Treatment,
    gradient_checkpoint_forward,
    gradient_engine,
)

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 8
MIB = 1024 * 1024


class Block(nn.Module):
    """Drops half of its input, in place of a LoRA's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, *, hidden_states: Tensor, shared: dict[str, Tensor]) -> Tensor:
        dropped = nn.functional.dropout(hidden_states * shared["temb"], 0.5)
        return (dropped * self.scale).sin()


def step(flags: tuple[bool, bool], num_rows: int) -> tuple[list[Tensor], float]:
    """Gradients of a stack called with keywords only, and the MiB that its forward pass leaves allocated."""
    torch.manual_seed(0)
    blocks = [Block().cuda() for _ in range(NUM_BLOCKS)]
    x, shared = torch.rand(num_rows, 1024, device="cuda"), {"temb": torch.ones(1024, device="cuda")}
    before = torch.cuda.memory_allocated()
    for block in blocks:
        x = gradient_checkpoint_forward(block, *flags, hidden_states=x, shared=shared)
    allocated = (torch.cuda.memory_allocated() - before) / MIB
    x.sum().backward()
    return [block.scale.grad for block in blocks], allocated


@pytest.mark.parametrize("flags", ALL_FLAGS)
@pytest.mark.parametrize("num_rows", [1, 64])
def test_a_keyword_call_draws_the_same_dropout_in_the_recompute(
    flags: tuple[bool, bool], num_rows: int
) -> None:
    # One row is below the 64 KiB that are parked, so nothing but tensors left on the device tells of CUDA.
    reference, _ = step((False, False), num_rows)
    gradients, _ = step(flags, num_rows)
    assert all(torch.equal(one, other) for one, other in zip(gradients, reference, strict=True))


def test_parked_inputs_leave_the_device() -> None:
    engine, rows_of_16_mib = GradientEngine(), 4096
    _, checkpointed = step((True, False), rows_of_16_mib)
    with gradient_engine(engine):
        _, parked = step((True, True), rows_of_16_mib)
    # The output of the last block takes the place of the first input, which was allocated before.
    assert checkpointed >= NUM_BLOCKS * 16
    assert parked < 1
    assert engine.report().bytes_parked == NUM_BLOCKS * 16 * MIB


class AttentionBlock(nn.Module):
    """Attention with dropout behind it, then a product that nothing needs."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.last = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 16)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(query, query, query).transpose(1, 2).flatten(2)
        return x + self.gate * self.last(nn.functional.dropout(attended, 0.5).sin())


@pytest.mark.parametrize("save_attention", ["keep", "park"])
@pytest.mark.parametrize("offload", [False, True])
def test_saved_attention_and_skipped_products_change_nothing(save_attention: str, offload: bool) -> None:
    treatment = Treatment(park=True, save_attention=save_attention)
    engine = GradientEngine(policy=BlockPolicy(selected=treatment))
    torch.manual_seed(0)
    blocks = [AttentionBlock().cuda().bfloat16() for _ in range(3)]
    inputs = torch.randn(2, 1024, 64, device="cuda", dtype=torch.bfloat16)

    def gradients(checkpointing: bool) -> list[Tensor]:
        torch.manual_seed(1)
        x = inputs
        with gradient_engine(engine):
            for block in blocks:
                x = gradient_checkpoint_forward(block, checkpointing, checkpointing and offload, x)
        return list(torch.autograd.grad(x.float().square().sum(), [block.query.weight for block in blocks]))

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(found, expected)
    report = engine.report()
    assert (report.attention_saved, report.attention_not_saved) == (3, 0)
    assert (report.attention_bytes_parked > 0) == (save_attention == "park")
    assert report.dead_ops_skipped == 3
