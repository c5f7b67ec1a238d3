"""What the engine offloads, what stays on the device, and what blocks share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_models import qwen_image_with_lora, training_step, with_flags
from lazy_backend import LazyBackend
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.gradient import (
    GradientEngine,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)
from diffsynth_lite.core.gradient.frames import ForwardPass, OffloadedTensor, num_bytes
from diffsynth_lite.core.transfer.backends import Copy, PlainBackend
from diffsynth_lite.core.transfer.host_pool import HostPool

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


def test_torch_itself_offloads_nothing_of_a_keyword_and_we_offload_all() -> None:
    weight, rotary = torch.ones(8, requires_grad=True), (torch.rand(8), torch.rand(8))

    def block(*, hidden_states: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        return hidden_states * weight * rotary[0] + rotary[1]

    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.cpu()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        checkpoint(block, hidden_states=weight * 2, rotary=rotary, use_reentrant=False).sum().backward()
    assert packed == []

    engine = GradientEngine()
    with gradient_engine(engine):
        gradient_checkpoint_forward(block, True, True, hidden_states=weight * 2, rotary=rotary)
    assert engine.report().tensors_offloaded == 3
    assert engine.report().bytes_offloaded == 3 * 8 * 4


@pytest.mark.parametrize("offload", [False, True])
def test_the_memory_of_an_offloaded_input_is_free_until_backward(offload: bool) -> None:
    weight = torch.rand(64, requires_grad=True)

    def forward() -> tuple[Tensor, list[StorageWeakRef]]:
        inputs = [weight * 2, weight * 3]
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in inputs]
        output = gradient_checkpoint_forward(
            lambda x, options: x * options["scale"][0],
            True,
            offload,
            inputs[0],
            options={"scale": [inputs[1]]},
        )
        return output, storages

    output, storages = forward()
    assert [storage.expired() for storage in storages] == [offload, offload]
    output.sum().backward()
    assert torch.equal(weight.grad, 12 * weight)


def test_every_block_input_of_qwen_image_is_offloaded_or_shared() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    own: list[int] = []
    shared: list[int] = []

    def run(index: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden_states, prompt, mask, temb, rotary, _, modulate_index = args
        own.extend(x.nbytes for x in (hidden_states, prompt))
        shared.extend(x.nbytes for x in (mask, temb, *rotary, modulate_index))
        return gradient_checkpoint_forward(block, False, True, *args, **kwargs)

    with gradient_engine(engine):
        training_step(case, intercept_blocks(case.model, run))
        first = engine.report()
        engine.start_report()
        training_step(case, intercept_blocks(case.model, run))
        second = engine.report()
    assert first.blocks_run == first.blocks_checkpointed == first.blocks_recomputed == 3
    assert first.not_offloaded == second.not_offloaded == {}
    # The first block of the first step cannot know what others will receive too.
    assert (first.tensors_offloaded, first.tensors_shared) == (3 * 2 + 5, 2 * 5)
    assert first.bytes_offloaded == sum(own[:6]) + sum(shared[:5])
    assert first.bytes_shared == sum(shared[5:15])
    assert (second.tensors_offloaded, second.bytes_offloaded) == (3 * 2, sum(own[6:]))
    assert (second.tensors_shared, second.bytes_shared) == (3 * 5, sum(shared[15:]))


TENSORS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "contiguous": (lambda: torch.rand(2, 3), 24),
    "transposed": (lambda: torch.rand(2, 3).T, 24),
    "channels last": (lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), 480),
    "a slice with gaps": (lambda: torch.rand(4, 6)[:, 1:3], 32),
    "overlapping windows": (lambda: torch.rand(6).unfold(0, 3, 1), 48),
    "a scalar": (lambda: torch.rand(()), 4),
    "bool": (lambda: torch.rand(5) > 0.5, 5),
    "int64": (lambda: torch.arange(5), 40),
    "complex64": (lambda: torch.rand(3, dtype=torch.complex64), 24),
    "bfloat16": (lambda: torch.rand(3, dtype=torch.bfloat16), 6),
    "float8": (lambda: torch.rand(3).to(torch.float8_e4m3fn), 3),
}


@pytest.mark.parametrize(("make", "num_bytes"), TENSORS.values(), ids=TENSORS.keys())
def test_an_offloaded_tensor_comes_back_as_it_was(make: Callable[[], Tensor], num_bytes: int) -> None:
    weight, tensor, engine = torch.ones(3, requires_grad=True), make(), GradientEngine(resident_blocks=0)
    seen: list[Tensor] = []

    def block(x: Tensor, tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return x.sin()

    with gradient_engine(engine):
        gradient_checkpoint_forward(block, False, True, weight, tensor=tensor).sum().backward()
    before, after = seen
    assert before is tensor
    assert after.data_ptr() != tensor.data_ptr()
    assert (after.shape, after.stride(), after.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(after.to(torch.complex64), tensor.to(torch.complex64))
    assert engine.report().bytes_offloaded == weight.nbytes + num_bytes


def test_an_offloaded_tensor_brings_no_history_back() -> None:
    tensor, backend = torch.ones(3, requires_grad=True), PlainBackend()
    offloaded = OffloadedTensor(
        tensor, HostPool(None).take(num_bytes(tensor), backend.allocate_host), backend
    )
    assert not offloaded.restore().requires_grad
    offloaded.leave_device()
    assert not offloaded.restore().requires_grad


class Marked(Tensor):
    """A class of tensor of somebody else's."""


LEFT: dict[str, tuple[Callable[[Tensor], Tensor], int | None]] = {
    "below min_bytes": (lambda x: x * 2, 33),
    "parameter": (lambda x: nn.Parameter(x.detach()), None),
    "tensor subclass": (lambda x: (x * 2).as_subclass(Marked), None),
    "sparse, quantized or conjugated": (lambda x: (x * 2).to_sparse(), None),
    "expanded view": (lambda x: x[:1].expand(8), None),
    "host memory full": (lambda x: x * 2, None),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_not_offloaded_is_counted_by_reason_and_keeps_its_class(reason: str) -> None:
    make, min_bytes = LEFT[reason]
    host_bytes = 4095 if reason == "host memory full" else None
    weight, engine = torch.rand(8, requires_grad=True), GradientEngine(min_bytes, host_bytes)
    tensor = make(weight)
    seen: list[type] = []

    def block(x: Tensor) -> Tensor:
        seen.append(type(x))
        return x.to_dense().square().sum()

    with gradient_engine(engine):
        gradient_checkpoint_forward(block, False, True, x=tensor).backward()
    assert seen == [type(tensor)] * 2
    report = engine.report()
    assert report.tensors_offloaded == 0
    assert report.not_offloaded.keys() == {reason}
    found = report.not_offloaded[reason]
    assert (found.num_tensors, found.num_bytes, found.largest_bytes) == (1, 32, 32)


def test_a_step_in_which_half_of_the_tensors_are_too_small_is_the_same_step() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine(min_bytes=1000)
    reference = training_step(case)
    with gradient_engine(engine):
        assert training_step(case, intercept_blocks(case.model, with_flags((True, True)))) == reference
    report = engine.report()
    small = report.not_offloaded["below min_bytes"]
    assert report.tensors_offloaded + report.tensors_shared + small.num_tensors == 21
    assert report.tensors_offloaded > 0
    assert small.largest_bytes < 1000


def test_a_torch_that_does_not_show_whether_backward_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"_current_graph_task_id.*set use_gradient_checkpointing_offload"):
        gradient_checkpoint_forward(torch.sin, False, True, x * 1)


def test_empty_tensors_are_neither_offloaded_nor_counted_as_offloaded() -> None:
    engine, nothing = GradientEngine(), torch.rand(0, 3, requires_grad=True)
    with gradient_engine(engine):
        gradient_checkpoint_forward(torch.sin, False, True, nothing).sum().backward()
    # So does torch before 2.12, whose checkpoint saves an empty tensor of its own.
    with engine.frame() as context, context.of_saved_tensors():
        nothing.square().sum().backward()
    assert engine.report().tensors_offloaded == 0
    assert engine.report().not_offloaded["below min_bytes"].num_tensors == 1


@pytest.mark.parametrize("name", ["min_bytes", "host_bytes", "resident_blocks", "prefetched_blocks"])
def test_a_negative_number_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is -1"):
        GradientEngine(**{name: -1})
