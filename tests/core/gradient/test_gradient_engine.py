"""What is on the device does not grow with the number of blocks; what blocks share stays."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lazy_backend import LazyBackend
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from diffsynth_lite.core.gradient import (
    GradientEngine,
    gradient_checkpoint_forward,
    gradient_engine,
)
from diffsynth_lite.core.gradient.frames import ForwardPass
from diffsynth_lite.core.transfer.backends import Copy, PlainBackend

OFFLOAD = (False, True)


class WatchedBackend(PlainBackend):
    """Counts the offloaded tensors that are on the device: not gone yet, or fetched back."""

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []

    def to_host(self, host: Tensor, tensor: Tensor) -> Copy:
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return super().to_host(host, tensor)

    def to_device(self, tensor: Tensor, host: Tensor) -> Copy:
        self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return super().to_device(tensor, host)

    @property
    def num_on_device(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def most_on_device(num_blocks: int, resident: int, prefetched: int) -> tuple[int, int, GradientEngine]:
    """Block inputs on the device after forward, and the most of them during backward."""
    backend = WatchedBackend()
    engine = GradientEngine(resident_blocks=resident, prefetched_blocks=prefetched, backend=backend)
    during: list[int] = []
    weight = torch.rand(8, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        during.append(backend.num_on_device)
        return (x * weight).sin()

    with gradient_engine(engine):
        x = weight * 1
        for _ in range(num_blocks):
            x = gradient_checkpoint_forward(block, *OFFLOAD, x)
    after_forward = backend.num_on_device
    during.clear()
    x.sum().backward()
    return after_forward, max(during), engine


@pytest.mark.parametrize(("resident", "prefetched"), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 3)])
def test_what_is_on_the_device_does_not_grow_with_the_blocks(resident: int, prefetched: int) -> None:
    few = most_on_device(8, resident, prefetched)
    many = most_on_device(24, resident, prefetched)
    assert few[:2] == many[:2]
    assert few[0] == resident
    assert few[1] <= max(resident, 1) + prefetched
    assert many[2].report().tensors_offloaded == 24


@pytest.mark.parametrize(
    ("resident", "prefetched", "late"), [(0, 0, 6), (1, 0, 5), (0, 1, 1), (1, 1, 0), (2, 2, 0)]
)
def test_with_one_block_ahead_nothing_is_fetched_late(resident: int, prefetched: int, late: int) -> None:
    engine = most_on_device(6, resident, prefetched)[2]
    assert engine.report().late_prefetches == late


def test_a_block_that_offloads_nothing_sends_nobody_away() -> None:
    engine, weight = GradientEngine(prefetched_blocks=0), torch.rand(8, requires_grad=True)
    with gradient_engine(engine):
        x = gradient_checkpoint_forward(torch.sin, *OFFLOAD, weight * 2)
        gradient_checkpoint_forward(torch.sin, True, False, x).sum().backward()
    assert (engine.report().tensors_offloaded, engine.report().late_prefetches) == (1, 0)


def test_a_call_outside_of_any_scope_frees_its_inputs_too() -> None:
    weight = torch.rand(8, requires_grad=True)

    def forward() -> tuple[Tensor, StorageWeakRef]:
        x = weight * 2
        return gradient_checkpoint_forward(torch.sin, *OFFLOAD, x), StorageWeakRef(x.untyped_storage())

    output, storage = forward()
    assert storage.expired()
    output.sum().backward()
    assert torch.equal(weight.grad, 2 * (weight * 2).cos())


def test_hooks_of_others_keep_working_around_and_inside_of_blocks() -> None:
    engine, seen = GradientEngine(backend=LazyBackend()), []
    weight = torch.rand(8, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    def block(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return (x * weight).sin()

    def gradient(run: Callable[..., Tensor]) -> Tensor:
        weight.grad = None
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            x = run(block, run(block, weight * 2))
            (x * weight).sum().backward()
        return weight.grad

    reference = gradient(lambda block, x: block(x))
    num_saved = len(seen)
    with gradient_engine(engine):
        found = gradient(lambda block, x: gradient_checkpoint_forward(block, *OFFLOAD, x))
    assert torch.equal(found, reference)
    assert len(seen) > num_saved > 0
    assert engine.host_pool.num_bytes_lent == 0


def test_a_block_inside_of_a_block_is_offloaded_in_its_forward_pass_only() -> None:
    engine = GradientEngine(backend=LazyBackend())
    weight = torch.rand(8, requires_grad=True)

    def inner(x: Tensor) -> Tensor:
        return (x * weight).sin()

    def outer(x: Tensor) -> Tensor:
        return gradient_checkpoint_forward(inner, *OFFLOAD, x * weight) * weight

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        weight.grad = None
        run(run(weight * 1)).sum().backward()
        return weight.grad

    reference = gradient(lambda x: inner(x * weight) * weight)
    with gradient_engine(engine):
        found = gradient(lambda x: gradient_checkpoint_forward(outer, *OFFLOAD, x))
    assert torch.equal(found, reference)
    assert engine.report().not_offloaded["inside of a backward pass"].num_tensors > 0
    assert engine.host_pool.num_bytes_lent == 0


def test_a_block_can_offload_more_than_its_inputs() -> None:
    backend = LazyBackend()
    engine, weight = GradientEngine(backend=backend), torch.rand(8, requires_grad=True)

    class Expensive(torch.autograd.Function):
        """A sine that offloads its input with the block."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.offloaded = engine.offload(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.offloaded.restore().cos()

    def block(x: Tensor) -> Tensor:
        return Expensive.apply(x * 2)

    x = weight * 1
    with gradient_engine(engine):
        for _ in range(4):
            with engine.frame():
                x = block(x)
    x.sum().backward()
    found, weight.grad = weight.grad, None
    x = weight * 1
    for _ in range(4):
        x = (x * 2).sin()
    x.sum().backward()
    assert torch.equal(found, weight.grad)
    report = engine.report()
    assert (report.tensors_offloaded, report.late_prefetches) == (4, 0)
    del x
    assert engine.host_pool.num_bytes_lent == 0


def test_tensors_of_one_block_that_share_memory_are_copied_once() -> None:
    engine, weight = GradientEngine(resident_blocks=0), torch.rand(8, requires_grad=True)
    with gradient_engine(engine):
        x = weight * 2
        loss = gradient_checkpoint_forward(torch.mul, *OFFLOAD, x, x.view_as(x)).sum()
    loss.backward()
    assert torch.equal(weight.grad, 8 * weight)
    # What is shared stays on the device: a tensor is shared with another block only.
    assert (engine.report().tensors_offloaded, engine.report().tensors_shared) == (1, 0)


def test_a_tensor_is_shared_although_blocks_without_it_lie_between() -> None:
    engine, weight = GradientEngine(resident_blocks=0), torch.rand(8, requires_grad=True)
    text = torch.rand(8)
    with gradient_engine(engine):
        for offloaded in (3 + 2, 4):
            engine.start_report()
            x = gradient_checkpoint_forward(torch.mul, *OFFLOAD, weight * 1, text)
            x = gradient_checkpoint_forward(torch.sin, *OFFLOAD, x)
            x = gradient_checkpoint_forward(torch.mul, *OFFLOAD, x, text)
            gradient_checkpoint_forward(torch.cos, *OFFLOAD, x).sum().backward()
            assert engine.report().tensors_offloaded == offloaded


def test_memory_that_is_used_again_is_not_taken_for_shared() -> None:
    forward_pass = ForwardPass()
    for number in range(100):
        # Freed in the next turn, so that a later one would be where this one was.
        tensor = torch.full((8,), number)
        assert not forward_pass.is_shared(tensor, (number, 0))
