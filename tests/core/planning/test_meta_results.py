"""What is known of an operator on meta is what torch would say again, and is said of nothing else."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from diffsynth_lite.core.planning import MetaResults

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
