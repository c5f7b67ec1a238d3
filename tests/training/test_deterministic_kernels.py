"""Kernels that give the same bits each time, and the warning where there is none."""

import pytest
import torch

from diffsynth_lite.errors import UserError
from diffsynth_lite.training.session import deterministic_kernels


def switches() -> tuple[bool, bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.utils.deterministic.fill_uninitialized_memory,
    )


@pytest.mark.parametrize("warn_only", [False, True])
def test_the_switches_of_torch_are_as_before_afterwards(warn_only: bool) -> None:
    before = switches()
    torch.use_deterministic_algorithms(warn_only, warn_only=warn_only)
    torch.backends.cudnn.benchmark = True
    try:
        set_by_someone = switches()
        with deterministic_kernels():
            assert switches() == (True, False, False, False)
        assert switches() == set_by_someone
        with pytest.raises(ZeroDivisionError), deterministic_kernels():
            raise ZeroDivisionError
        assert switches() == set_by_someone
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]


def without_repeatable_kernel() -> None:
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))


def test_an_operation_without_a_repeatable_kernel_ends_the_run_by_name() -> None:
    without_repeatable_kernel()
    with (
        pytest.raises(UserError, match=r"train\.deterministic.*put_.*Set it to false"),
        deterministic_kernels(),
    ):
        without_repeatable_kernel()


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^a shape$"), deterministic_kernels():
        raise RuntimeError("a shape")
