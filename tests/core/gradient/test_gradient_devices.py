"""The checks that a GPU is given, on the CPU: plain copies, late copies, no host memory."""

from collections.abc import Callable
from typing import Any

import pytest
from device_checks import check_flags, check_full, check_offload, check_refused, check_savings, check_stream
from gradient_models import ALL_FLAGS, by_turns
from lazy_backend import LazyBackend

from diffsynth_lite.core.transfer.backends import PlainBackend

BACKENDS = [PlainBackend, LazyBackend]


@pytest.mark.parametrize("flags", ALL_FLAGS)
def test_a_keyword_call_draws_the_same_dropout_in_the_recompute(flags: tuple[bool, bool]) -> None:
    check_flags("cpu", 4, flags)


@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize(("resident", "prefetched"), [(0, 0), (0, 1), (1, 1), (2, 3)])
def test_offloaded_steps_are_the_same_steps(
    make_backend: Callable[[], Any], resident: int, prefetched: int
) -> None:
    check_offload("cpu", 4, resident=resident, prefetched=prefetched, backend=make_backend())


def test_without_host_memory_the_inputs_stay_and_the_gradients_are_the_same() -> None:
    check_refused("cpu", LazyBackend(host_bytes=0))


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_with_too_little_host_memory_the_rest_stays_and_the_gradients_are_the_same(
    make_backend: Callable[[], Any],
) -> None:
    check_full("cpu", 4, make_backend())


@pytest.mark.parametrize("make_backend", BACKENDS)
@pytest.mark.parametrize("save_attention", ["keep", "park"])
@pytest.mark.parametrize("offload", [False, True])
def test_saved_attention_and_skipped_products_change_nothing(
    make_backend: Callable[[], Any], save_attention: Any, offload: bool
) -> None:
    check_savings("cpu", 16, save_attention=save_attention, offload=offload, make_backend=make_backend)


@pytest.mark.parametrize(("flags", "num_slots", "make_backend"), by_turns(BACKENDS, ALL_FLAGS, [1, 2, 3]))
def test_streamed_weights_give_the_same_gradients(
    make_backend: Callable[[], Any], flags: tuple[bool, bool], num_slots: int
) -> None:
    check_stream("cpu", 4, flags=flags, num_slots=num_slots, backend=make_backend())
