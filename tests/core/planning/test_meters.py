"""Meters of live bytes and work, and results on meta that are known, against what torch does."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from diffsynth_lite.core.planning.meters import CountingMeter, LiveBytes, MetaResults, Work

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


aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Counted:
    """An operator, and how often torch was asked for its result."""

    def __init__(self, func: Any) -> None:
        self._func, self._schema, self.calls = func, func._schema, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._func(*args, **kwargs)


def each(value: Tensor | Sequence[Tensor | None]) -> list[Tensor | None]:
    return [value] if isinstance(value, Tensor) else [*value]


def layout(tensor: Tensor | None) -> tuple[object, ...]:
    return () if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


NORM_BACKWARD = (meta(2, 3), meta(2, 3), [3], meta(2, 1), meta(2, 1), meta(3), None, [True, True, False])


@pytest.mark.parametrize(
    ("func", "given", "named"),
    [
        (aten.mul.Tensor, (meta(2, 3).T, meta(2)), {}),
        (aten.native_layer_norm_backward.default, NORM_BACKWARD, {}),  # two tensors and none
        (aten.split_with_sizes_copy.default, (meta(5, 4), [2, 3]), {}),  # a list
        (aten._to_copy.default, (meta(4),), {"dtype": torch.bfloat16}),
    ],
)
def test_torch_is_asked_once_for_inputs_that_are_alike(
    func: Any, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    counted, results = Counted(func), MetaResults()
    first, second = (results.of(counted, given, named) for _ in range(2))
    assert counted.calls == 1
    assert type(first) is type(second)
    assert list(map(layout, each(first))) == list(map(layout, each(second)))
    made = [tensor for tensor in (*each(first), *each(second)) if tensor is not None]
    assert len({*map(memory, made)}) == len(made)


def test_other_inputs_are_other_calls() -> None:
    results, whole = MetaResults(), meta(2, dtype=torch.int64)
    sums = [results.of(aten.add.Tensor, (whole, number), {}) for number in (1, 1.0, True)]
    assert [one.dtype for one in sums] == [torch.int64, torch.float32, torch.int64]
    given = [meta(2, 3), meta(3, 2).T, meta(2, 3, dtype=torch.bfloat16)]
    assert [layout(results.of(aten.neg.default, (one,), {})) for one in given] == list(map(layout, given))


@pytest.mark.parametrize(
    ("func", "given"),
    [
        (aten.view.default, (meta(6), [2, 3])),
        (aten._unsafe_view.default, (meta(6), [2, 3])),  # a view that does not say so
        (aten.add_.Tensor, (meta(6), 1)),
        (aten.mul.Tensor, (torch.ones(2), 2)),  # numbers
        (aten.mul.Tensor, (meta(2, dtype=torch.complex64), 2)),
    ],
    ids=str,
)
def test_what_is_more_than_new_memory_on_meta_is_asked_for_each_time(
    func: Any, given: tuple[Any, ...]
) -> None:
    counted, results = Counted(func), MetaResults()
    values = [results.of(counted, given, {}) for _ in range(2)]
    assert counted.calls == 2
    expected = func(*given)
    for value in values:
        assert layout(value) == layout(expected)
        assert (memory(value) == memory(given[0])) == (memory(expected) == memory(given[0]))
        assert value.is_meta or torch.equal(value, expected)
