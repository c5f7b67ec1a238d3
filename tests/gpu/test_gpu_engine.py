"""On a CUDA device copies overlap with the computation, nothing waits on the host, and no number changes."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_checks import (
    BYTES_PER_ROW,
    NUM_BLOCKS,
    Stack,
    check_flags,
    check_full,
    check_offload,
    check_refused,
    check_savings,
    check_stream,
)
from gradient_models import ALL_FLAGS
from torch import Tensor, nn

from diffsynth_lite.core.gradient import GradientEngine, gradient_checkpoint_forward, gradient_engine
from diffsynth_lite.core.transfer.backends import Copy, CudaBackend

pytestmark = pytest.mark.gpu

MIB = 1024 * 1024
ROWS_OF_16_MIB = 16 * MIB // BYTES_PER_ROW


def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


class SlowBackend(CudaBackend):
    """Copies that begin late: where a wait is missing, others use their memory first."""

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> Copy:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
        return super()._copy(stream, target, source)


class RefusedBackend(CudaBackend):
    """On a system that pins no memory."""

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        return None


@pytest.mark.parametrize("flags", ALL_FLAGS)
@pytest.mark.parametrize("num_rows", [1, 64])
def test_a_keyword_call_draws_the_same_dropout_in_the_recompute(
    flags: tuple[bool, bool], num_rows: int
) -> None:
    # One row is below the 64 KiB that are offloaded, so only tensors left on the device name CUDA.
    check_flags("cuda", num_rows, flags)


@pytest.mark.parametrize("make_backend", [CudaBackend, SlowBackend])
@pytest.mark.parametrize(("resident", "prefetched"), [(0, 0), (0, 1), (1, 1), (2, 3)])
def test_copies_change_no_gradient_even_if_they_begin_late(
    make_backend: Callable[[torch.device], Any], resident: int, prefetched: int
) -> None:
    backend = make_backend(cuda())
    check_offload("cuda", ROWS_OF_16_MIB, resident=resident, prefetched=prefetched, backend=backend)


def test_without_pinned_memory_the_inputs_stay_and_the_gradients_are_the_same() -> None:
    check_refused("cuda", RefusedBackend(cuda()))


@pytest.mark.parametrize("make_backend", [CudaBackend, SlowBackend])
def test_with_too_little_host_memory_the_rest_stays_and_the_gradients_are_the_same(
    make_backend: Callable[[torch.device], Any],
) -> None:
    check_full("cuda", ROWS_OF_16_MIB, make_backend(cuda()))


@pytest.mark.parametrize("save_attention", ["keep", "park"])
@pytest.mark.parametrize("offload", [False, True])
def test_saved_attention_and_skipped_products_change_nothing(save_attention: Any, offload: bool) -> None:
    check_savings("cuda", 1024, save_attention=save_attention, offload=offload, make_backend=None)


@pytest.mark.parametrize("make_backend", [CudaBackend, SlowBackend])
@pytest.mark.parametrize("flags", ALL_FLAGS)
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_streamed_weights_give_the_same_gradients_even_if_their_copies_begin_late(
    make_backend: Callable[[torch.device], Any], flags: tuple[bool, bool], num_slots: int
) -> None:
    backend = make_backend(cuda())
    check_stream("cuda", ROWS_OF_16_MIB, flags=flags, num_slots=num_slots, backend=backend)


def test_offloading_never_makes_the_host_wait() -> None:
    stack = Stack("cuda", ROWS_OF_16_MIB)
    with gradient_engine(GradientEngine()):
        for _ in range(2):
            stack.gradients((True, True))  # pins host memory
        torch.cuda.set_sync_debug_mode("error")
        try:
            stack.gradients((True, True))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("resident", [0, 1])
def test_offloaded_inputs_leave_the_device_after_the_forward_pass(resident: int) -> None:
    stack = Stack("cuda", ROWS_OF_16_MIB)

    def allocated(flags: tuple[bool, bool]) -> int:
        before = torch.cuda.memory_allocated()
        output = stack.forward(flags)
        allocated = torch.cuda.memory_allocated() - before
        del output
        return allocated

    assert allocated((True, False)) >= NUM_BLOCKS * 16 * MIB
    with gradient_engine(GradientEngine(resident_blocks=resident)):
        # The output of the last block, and the inputs that are resident.
        assert allocated((True, True)) < (1 + resident) * 16 * MIB + MIB


def test_the_peak_is_lower_by_what_was_offloaded_and_the_report_has_it() -> None:
    stack = Stack("cuda", ROWS_OF_16_MIB)

    def peak(flags: tuple[bool, bool]) -> int:
        torch.cuda.reset_peak_memory_stats()
        stack.gradients(flags)
        return torch.cuda.max_memory_allocated()

    checkpointed, engine = peak((True, False)), GradientEngine()
    with gradient_engine(engine):
        offloaded = peak((True, True))
    # One block is at work, one is fetched ahead of it, and one is on its way out.
    assert checkpointed - offloaded >= (NUM_BLOCKS - 3) * 16 * MIB
    report = engine.report()
    assert report.device_bytes_peak == offloaded > report.device_bytes_after_forward > 0


def test_a_copy_to_the_host_completes_while_the_device_computes() -> None:
    backend = CudaBackend(cuda())
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


def test_memory_that_is_mapped_twice_is_pinned_in_both_places() -> None:
    descriptor = os.memfd_create("shared")
    os.posix_fallocate(descriptor, 0, 4 * MIB)
    first, second = CudaBackend(cuda()), CudaBackend(cuda())
    written, read = (backend.allocate_host(4 * MIB, descriptor) for backend in (first, second))
    os.close(descriptor)
    assert written is not None
    assert read is not None
    assert written.is_pinned()
    assert read.is_pinned()
    assert written.data_ptr() != read.data_ptr()
    values = torch.arange(MIB, device="cuda", dtype=torch.int32)
    first.to_host(written.view(torch.int32), values)
    torch.cuda.synchronize()
    arrived = torch.zeros_like(values)
    second.to_device(arrived, read.view(torch.int32)).wait()
    assert torch.equal(arrived, values)


class Product(nn.Module):
    """A block whose product takes several times as long as the copy of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8192) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sin()


@pytest.mark.filterwarnings("ignore:.*:UserWarning:torch.profiler")
def test_in_a_step_copies_of_both_directions_overlap_kernels() -> None:
    blocks, engine = [Product().cuda() for _ in range(4)], GradientEngine()
    inputs = torch.randn(2048, 8192, device="cuda")

    def step() -> None:
        x = inputs * 1
        with gradient_engine(engine):
            for block in blocks:
                x = gradient_checkpoint_forward(block, True, True, x)
        torch.autograd.grad(x.sum(), [block.weight for block in blocks])

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    kernels = [span for span in spans if not span[0].startswith(("Memcpy", "Memset"))]
    for direction in ("Memcpy DtoH", "Memcpy HtoD"):
        copies = [span for span in spans if span[0].startswith(direction)]
        assert copies, f"no {direction} among {sorted({name for name, *_ in spans})}"
        assert any(
            kernel_start < end and start < kernel_end
            for _, start, end in copies
            for _, kernel_start, kernel_end in kernels
        )


def test_pinned_memory_that_is_freed_can_be_pinned_again() -> None:
    backend = CudaBackend(cuda())
    for _ in range(3):
        host = backend.allocate_host(300 * MIB)
        assert host is not None
        backend.to_host(host, torch.ones(300 * MIB, dtype=torch.uint8, device="cuda"))
        del host
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
