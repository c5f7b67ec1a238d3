"""The memory that is counted is that of the tensors that are there, and the work that of all operators."""

import pytest
import torch

from diffsynth_lite.core.planning.meters import CountingMeter, LiveBytes, Work

KIB = 1024


def kib(number: int) -> torch.Tensor:
    return torch.ones(number * 256)


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    live = LiveBytes()
    tensor = kib(4)
    view = tensor[256:]
    live.add(tensor)
    live.add(view)
    assert live.num_bytes == 4 * KIB
    del tensor
    assert live.num_bytes == 4 * KIB
    del view
    assert (live.num_bytes, live.peak_bytes) == (0, 4 * KIB)


def test_what_was_there_before_and_what_is_ignored_do_not_count() -> None:
    weight, meter = kib(1), CountingMeter()
    with meter:
        first = weight * 2
        meter.start()
        transposed, host, product = weight.view(16, 16).t(), kib(8), weight * 3
        meter.ignore(host)
        assert meter.num_bytes == product.nbytes == KIB
        assert meter.peak_bytes == 9 * KIB
        del first, transposed, host
        assert meter.num_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_saved_tensors_and_gradients_are_counted_as_autograd_keeps_them(device: str) -> None:
    x = torch.ones(256, device=device, requires_grad=True)
    meter = CountingMeter()
    with meter:
        meter.start()
        # exp saves its result, sin its argument, which is the same tensor; the sum needs neither.
        loss = x.exp().sin().sum()
        assert meter.num_bytes == KIB + loss.nbytes
        loss.backward()
        del loss
        assert meter.num_bytes == KIB
        x.grad = None
        assert meter.num_bytes == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operators_count_with_what_they_compute_read_and_write_and_views_with_nothing(device: str) -> None:
    rows, weight = torch.ones(4, 16, device=device), torch.ones(16, 16, device=device)
    meter = CountingMeter()
    with meter:
        product = rows @ weight.t()
        assert meter.work == Work(flops=2 * 4 * 16 * 16, num_bytes=2 * rows.nbytes + weight.nbytes)
        before = meter.work
        product.view(16, 4).mul_(rows.view(16, 4))
        # In place: both are read, and one is written.
        assert meter.work - before == Work(num_bytes=3 * rows.nbytes)
