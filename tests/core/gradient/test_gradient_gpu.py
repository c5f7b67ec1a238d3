"""On a CUDA device dropout draws the same mask again, and parked inputs do not add up."""

import pytest
import torch
from gradient_models import ALL_FLAGS
from torch import Tensor, nn

from diffsynth_lite.core.gradient import GradientEngine, gradient_checkpoint_forward, gradient_engine

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
