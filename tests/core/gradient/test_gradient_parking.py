"""What is parked really leaves the device, comes back as it was, and is counted to the byte."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_models import qwen_image_with_lora, training_step, with_flags
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.gradient import (
    GradientEngine,
    blocks_run_by,
    gradient_checkpoint_forward,
    gradient_engine,
)
from diffsynth_lite.core.gradient.parking import ParkedTensor


def test_torch_alone_offloads_nothing_of_a_keyword_and_we_offload_all() -> None:
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
    assert engine.report().tensors_parked == 3
    assert engine.report().bytes_parked == 3 * 8 * 4


@pytest.mark.parametrize("offload", [False, True])
def test_the_memory_of_a_parked_input_is_free_until_backward(offload: bool) -> None:
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


def test_every_block_input_of_qwen_image_is_parked() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    sizes: list[int] = []

    def run(index: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hidden_states, prompt, mask, temb, rotary, _, modulate_index = args
        sizes.extend(x.nbytes for x in (hidden_states, prompt, mask, temb, *rotary, modulate_index))
        return gradient_checkpoint_forward(block, False, True, *args, **kwargs)

    with gradient_engine(engine):
        training_step(case, blocks_run_by(case.model, run))
    report = engine.report()
    assert report.blocks_run == report.blocks_checkpointed == report.blocks_recomputed == 3
    assert (report.tensors_parked, report.bytes_parked) == (len(sizes), sum(sizes))
    assert report.left == {}


TENSORS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "contiguous": (lambda: torch.rand(2, 3), 24),
    "transposed": (lambda: torch.rand(2, 3).T, 24),
    "channels last": (lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), 480),
    "a slice with gaps": (lambda: torch.rand(4, 6)[:, 1:3], 32),
    "expanded": (lambda: torch.rand(3, 1, 5).expand(3, 4, 5), 60),
    "an expanded slice": (lambda: torch.rand(3, 1, 10)[..., ::2].expand(3, 4, 5), 60),
    "overlapping windows": (lambda: torch.rand(6).unfold(0, 3, 1), 48),
    "a scalar": (lambda: torch.rand(()), 4),
    "bool": (lambda: torch.rand(5) > 0.5, 5),
    "int64": (lambda: torch.arange(5), 40),
    "complex64": (lambda: torch.rand(3, dtype=torch.complex64), 24),
    "conjugate": (lambda: torch.rand(3, dtype=torch.complex64).conj(), 24),
    "bfloat16": (lambda: torch.rand(3, dtype=torch.bfloat16), 6),
    "float8": (lambda: torch.rand(3).to(torch.float8_e4m3fn), 3),
}


@pytest.mark.parametrize(("make", "num_bytes"), TENSORS.values(), ids=TENSORS.keys())
def test_a_parked_tensor_comes_back_as_it_was(make: Callable[[], Tensor], num_bytes: int) -> None:
    weight, tensor, engine = torch.ones(3, requires_grad=True), make(), GradientEngine()
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
    assert engine.report().bytes_parked == weight.nbytes + num_bytes


def test_a_parked_tensor_brings_no_history_back() -> None:
    assert not ParkedTensor(torch.ones(3, requires_grad=True)).restore().requires_grad


class Marked(Tensor):
    """A class of tensor of somebody else's."""


LEFT: dict[str, tuple[Callable[[Tensor], Tensor], int | None]] = {
    "below min_bytes": (lambda x: x * 2, 33),
    "parameter": (lambda x: nn.Parameter(x.detach()), None),
    "tensor subclass": (lambda x: (x * 2).as_subclass(Marked), None),
    "sparse or quantized": (lambda x: (x * 2).to_sparse(), None),
}


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_not_parked_is_counted_by_reason_and_keeps_its_class(reason: str) -> None:
    make, min_bytes = LEFT[reason]
    weight, engine = torch.rand(8, requires_grad=True), GradientEngine(min_bytes)
    tensor = make(weight)
    seen: list[type] = []

    def block(x: Tensor) -> Tensor:
        seen.append(type(x))
        return x.to_dense().square().sum()

    with gradient_engine(engine):
        gradient_checkpoint_forward(block, False, True, x=tensor).backward()
    assert seen == [type(tensor)] * 2
    report = engine.report()
    assert report.tensors_parked == 0
    assert report.left.keys() == {reason}
    left = report.left[reason]
    assert (left.num_tensors, left.num_bytes, left.largest_bytes) == (1, 32, 32)


def test_a_step_in_which_half_of_the_tensors_are_too_small_is_the_same_step() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine(min_bytes=1000)
    reference = training_step(case)
    with gradient_engine(engine):
        assert training_step(case, blocks_run_by(case.model, with_flags((True, True)))) == reference
    report = engine.report()
    assert report.tensors_parked + report.left["below min_bytes"].num_tensors == 21
    assert report.tensors_parked > 0
    assert report.left["below min_bytes"].largest_bytes < 1000


def test_a_tensor_of_exactly_min_bytes_is_parked() -> None:
    engine = GradientEngine(min_bytes=32)
    with gradient_engine(engine):
        gradient_checkpoint_forward(torch.sin, False, True, torch.rand(8, requires_grad=True) * 1)
    assert engine.report().tensors_parked == 1


def test_empty_tensors_are_neither_parked_nor_counted_as_parked() -> None:
    engine, nothing = GradientEngine(), torch.rand(0, 3, requires_grad=True)
    with gradient_engine(engine):
        gradient_checkpoint_forward(torch.sin, False, True, nothing).sum().backward()
    # So does torch before 2.12, whose checkpoint saves an empty tensor of its own.
    with engine.parking():
        nothing.square().sum().backward()
    assert engine.report().tensors_parked == 0
    assert engine.report().left["below min_bytes"].num_tensors == 1


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="min_bytes is -1"):
        GradientEngine(min_bytes=-1)


def test_an_in_place_change_of_a_parked_tensor_does_not_reach_the_gradients() -> None:
    weight, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    loss = gradient_checkpoint_forward(torch.mul, False, True, weight, scale).sum()
    scale.zero_()
    loss.backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))


def test_an_in_place_change_of_a_tensor_left_on_the_device_raises() -> None:
    weight, scale = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    with gradient_engine(GradientEngine(min_bytes=1000)):
        loss = gradient_checkpoint_forward(torch.mul, False, True, weight, scale).sum()
    scale.zero_()
    with pytest.raises(RuntimeError, match=r"shape \(3,\).*changed in place"):
        loss.backward()
