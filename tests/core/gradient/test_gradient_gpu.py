"""On a CUDA device dropout draws the same mask again, and parking overlaps, waits and frees as it should."""

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
from diffsynth_lite.core.gradient.backends import Copy, CudaBackend

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


ROWS_OF_16_MIB = 4096


@pytest.mark.parametrize("resident", [0, 1])
def test_parked_inputs_leave_the_device(resident: int) -> None:
    engine = GradientEngine(resident_blocks=resident)
    _, checkpointed = step((True, False), ROWS_OF_16_MIB)
    with gradient_engine(engine):
        _, parked = step((True, True), ROWS_OF_16_MIB)
    # The output of the last block takes the place of the first input, which was allocated before.
    assert checkpointed >= NUM_BLOCKS * 16
    assert parked < 16 * resident + 1
    report = engine.report()
    assert report.bytes_parked == NUM_BLOCKS * 16 * MIB
    assert report.late_prefetches == 1 - resident
    assert report.device_bytes_peak >= report.device_bytes_after_forward > 0
    assert engine.host_pool.num_bytes_lent == 0


class SlowBackend(CudaBackend):
    """Copies that begin late: where a wait is missing, others use their memory first."""

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> Copy:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
        return super()._copy(stream, target, source)


@pytest.mark.parametrize(("resident", "prefetched"), [(0, 0), (1, 1), (2, 3)])
def test_copies_that_begin_late_change_no_gradient(resident: int, prefetched: int) -> None:
    reference, _ = step((False, False), ROWS_OF_16_MIB)
    backend = SlowBackend(torch.device("cuda", torch.cuda.current_device()))
    engine = GradientEngine(resident_blocks=resident, prefetched_blocks=prefetched, backend=backend)
    with gradient_engine(engine):
        for _ in range(3):
            gradients, _ = step((True, True), ROWS_OF_16_MIB)
            assert all(torch.equal(one, other) for one, other in zip(gradients, reference, strict=True))


def test_parking_never_makes_the_host_wait() -> None:
    with gradient_engine(GradientEngine()):
        step((True, True), ROWS_OF_16_MIB)  # pins host memory
        torch.cuda.set_sync_debug_mode("error")
        try:
            step((True, True), ROWS_OF_16_MIB)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_copy_to_the_host_completes_while_the_device_computes() -> None:
    backend = CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    tensor, host = torch.ones(MIB, device="cuda"), backend.allocate_host(4 * MIB)
    assert host is not None
    assert host.is_pinned()
    torch.cuda.synchronize()
    copy = backend.to_host(host.view(torch.float32), tensor)
    torch.cuda._sleep(2_000_000_000)
    computed = torch.cuda.Event()
    computed.record()
    backend._out.synchronize()
    assert not computed.query()
    assert host.view(torch.float32).sum() == MIB
    copy.wait()


def test_pinned_memory_that_is_freed_can_be_pinned_again() -> None:
    backend = CudaBackend(torch.device("cuda", torch.cuda.current_device()))
    for _ in range(3):
        host = backend.allocate_host(300 * MIB)
        assert host is not None
        backend.to_host(host, torch.ones(300 * MIB, dtype=torch.uint8, device="cuda"))
        del host
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()


class RefusedBackend(CudaBackend):
    """On a system that pins no memory."""

    def allocate_host(self, num_bytes: int) -> Tensor | None:
        return None


def test_without_pinned_memory_the_inputs_stay_and_the_gradients_are_the_same() -> None:
    reference, _ = step((False, False), 64)
    backend = RefusedBackend(torch.device("cuda", torch.cuda.current_device()))
    engine = GradientEngine(backend=backend)
    with gradient_engine(engine):
        gradients, _ = step((True, True), 64)
    assert all(torch.equal(one, other) for one, other in zip(gradients, reference, strict=True))
    assert engine.report().left["host memory refused by the system"].num_tensors == NUM_BLOCKS


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
