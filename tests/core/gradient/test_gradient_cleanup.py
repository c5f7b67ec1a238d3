"""Whatever ends a step, nothing of it is left behind."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_models import checkpointed_step, qwen_image, qwen_image_with_lora, training_step, with_flags
from lazy_backend import LazyBackend
from torch import Tensor

from diffsynth_lite.core.gradient import (
    GradientEngine,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)
from diffsynth_lite.core.transfer.backends import PlainBackend

OFFLOAD = (False, True)


def raise_in_forward(engine: GradientEngine) -> None:
    weight = torch.rand(8, requires_grad=True)

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError

    with gradient_engine(engine):
        x = gradient_checkpoint_forward(torch.sin, *OFFLOAD, weight * 2)
        with pytest.raises(ArithmeticError):
            gradient_checkpoint_forward(fails, *OFFLOAD, x * 2)


def raise_in_recompute(engine: GradientEngine) -> None:
    weight = torch.rand(8, requires_grad=True)
    calls: list[int] = []

    def fails_later(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ArithmeticError
        return x.sin()

    with gradient_engine(engine):
        x = weight * 2
        for block in (torch.sin, fails_later, torch.cos):
            x = gradient_checkpoint_forward(block, *OFFLOAD, x)
    with pytest.raises(ArithmeticError):
        x.sum().backward()


def drop_the_loss(engine: GradientEngine) -> None:
    case = qwen_image_with_lora()
    with gradient_engine(engine), intercept_blocks(case.model, with_flags(OFFLOAD)):
        case.model(**case.inputs)


def keep_the_graph(engine: GradientEngine) -> None:
    case = qwen_image()
    with gradient_engine(engine), intercept_blocks(case.model, with_flags(OFFLOAD)):
        loss = case.model(**case.inputs, return_dict=False)[0].sum()
    loss.backward(retain_graph=True)
    assert engine.host_pool.num_bytes_lent > 0
    loss.backward()


def accumulate(engine: GradientEngine) -> None:
    case = qwen_image_with_lora()
    with gradient_engine(engine):
        for _ in range(3):
            checkpointed_step(case, OFFLOAD, keep_gradients=True)


def differentiate_twice(engine: GradientEngine) -> None:
    weight = torch.rand(8, requires_grad=True)
    with gradient_engine(engine):
        loss = gradient_checkpoint_forward(lambda x: x.sin().exp(), *OFFLOAD, weight * 2).sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    gradient.sum().backward()
    del loss, gradient
    weight.grad = None


ENDINGS = [
    raise_in_forward,
    raise_in_recompute,
    drop_the_loss,
    keep_the_graph,
    accumulate,
    differentiate_twice,
]


@pytest.mark.parametrize("make_backend", [PlainBackend, LazyBackend])
@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_behind(
    ending: Callable[[GradientEngine], None], make_backend: Callable[[], Any]
) -> None:
    backend = make_backend()
    engine = GradientEngine(backend=backend)
    ending(engine)
    gc.collect()  # tracebacks refer to frames in cycles
    report = engine.report()
    assert report.tensors_offloaded > 0
    assert engine.host_pool.num_bytes_lent == 0
    if isinstance(backend, LazyBackend):
        assert backend.num_pending == 0
    torch.rand(3, requires_grad=True).exp().sum().backward()
    assert engine.report() == report
    with pytest.raises(RuntimeError, match="forward pass of a block"):
        engine.offload(torch.rand(3))


def test_a_pass_after_many_dropped_ones_is_like_the_first() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    reference = training_step(case)
    for _ in range(3):
        drop_the_loss(engine)
    engine.start_report()
    with gradient_engine(engine):
        assert checkpointed_step(case, OFFLOAD) == reference
    # What dropped passes showed of shared tensors holds too.
    assert (engine.report().tensors_offloaded, engine.report().tensors_shared) == (6, 15)
