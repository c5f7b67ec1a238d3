"""The CUDA backend, and who uses it, order all accesses to memory that copies share: on pretended streams."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_checks import check_full, check_offload, check_savings, check_stream
from stream_order import OnHostError, Stream, UnorderedError, stream_order

KEEP, RECOMPUTE, OFFLOAD = (False, False), (True, False), (False, True)


@pytest.mark.parametrize(("resident", "prefetched"), [(0, 0), (0, 1), (1, 1), (2, 3)])
def test_offload_is_ordered(resident: int, prefetched: int) -> None:
    with stream_order() as (_, backend):
        check_offload("cpu", 4, resident=resident, prefetched=prefetched, backend=backend)


def test_host_memory_that_is_lent_again_is_ordered() -> None:
    with stream_order() as (_, backend):
        check_full("cpu", 4, backend)


def test_attention_that_is_offloaded_is_ordered() -> None:
    with stream_order() as (_, backend):
        check_savings("cpu", 4, save_attention="park", offload=True, make_backend=lambda: backend)


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("flags", [KEEP, RECOMPUTE, OFFLOAD])
def test_streamed_weights_are_ordered(flags: tuple[bool, bool], num_slots: int) -> None:
    with stream_order() as (_, backend):
        check_stream("cpu", 4, flags=flags, num_slots=num_slots, backend=backend)


def test_whoever_waits_comes_after_a_copy_and_so_does_the_stream_that_gets_its_memory() -> None:
    with stream_order() as (order, backend):
        host, tensor = backend.allocate_host(64), torch.zeros(64, dtype=torch.uint8)
        other = Stream(order, torch.device("cpu"))
        copy = backend.to_device(tensor, host)
        with order.on(other):
            copy.wait()
            tensor.clone()
        order.compute.wait_stream(other)
        tensor = torch.zeros(64, dtype=torch.uint8)
        copy = backend.to_host(host, tensor)
        with order.on(other):
            copy.wait()
        del tensor


def test_what_is_computed_with_host_memory_is_found() -> None:
    with stream_order() as (_, backend):
        host = backend.allocate_host(64)
        with pytest.raises(OnHostError, match="aten::add"):
            host + 1


def without_waiting_for_what_was_computed(self: Stream, other: Stream) -> None:
    """Forget that a copy comes after what was computed before it."""


def without_waiting_for_the_copy(self: Stream, event: Any) -> None:
    """Forget that what is computed comes after the copy."""


@pytest.mark.parametrize(
    ("name", "forgetful"),
    [
        ("wait_stream", without_waiting_for_what_was_computed),
        ("wait_event", without_waiting_for_the_copy),
    ],
)
@pytest.mark.parametrize("flags", [KEEP, OFFLOAD])
def test_what_is_not_ordered_is_found(
    name: str, forgetful: Callable[..., None], flags: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, name, forgetful)
    with pytest.raises(UnorderedError), stream_order() as (_, backend):
        check_stream("cpu", 4, flags=flags, num_slots=2, backend=backend)
