"""The memory that the benchmarks count is that of the tensors that are there, no more and no less."""

import pytest
import torch
from meters import CountingMeter, LiveBytes
from offload import covered_ratio

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


@pytest.mark.parametrize(
    ("spans", "covers", "ratio"),
    [
        ([(0, 10)], [(0, 10)], 1),
        ([(0, 10)], [], 0),
        ([(0, 10), (20, 30)], [(5, 25)], 0.5),
        ([(0, 10)], [(2, 4), (3, 6), (3, 5), (8, 20)], 0.6),
        ([(2, 4), (2, 6)], [(5, 9), (0, 3)], 0.5),
        ([], [(0, 1)], None),
    ],
)
def test_the_covered_ratio_is_the_share_of_the_spans_that_lies_in_covers(
    spans: list[tuple[float, float]], covers: list[tuple[float, float]], ratio: float | None
) -> None:
    assert covered_ratio(spans, covers) == ratio
