"""checkpoint_blocks runs every block of a model through a function, and tells it what the policy says."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gradient_models import ALL_FLAGS, chroma, qwen_image, qwen_image_with_lora, training_step
from torch import Tensor, nn

from diffsynth_lite.core.gradient import (
    KEEP,
    RECOMPUTE,
    BlockPolicy,
    GradientEngine,
    block_runner,
    blocks_of,
    checkpoint_blocks,
    gradient_checkpoint_forward,
    gradient_engine,
    gradient_flags,
)

LISTS = ("transformer_blocks",)


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
def test_the_function_gets_each_block_the_switches_and_the_blocks_arguments(flags: tuple[bool, bool]) -> None:
    case, calls = qwen_image(), []

    def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append((block, *args[:2]))
        return block(*args[2:], **kwargs)

    step = training_step(case, checkpoint_blocks(case.model, LISTS, forward, *flags))
    assert calls == [(block, *flags) for block in case.model.transformer_blocks]
    assert step == training_step(case)


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [(BlockPolicy(select="only", blocks=(1,)), [1]), (BlockPolicy(select="last_k", n=2), [1, 2])],
)
@pytest.mark.parametrize("is_given", [True, False])
def test_each_block_is_treated_as_the_policy_says_for_its_place(
    policy: BlockPolicy, recomputed: list[int], is_given: bool
) -> None:
    case, ran = qwen_image_with_lora(), []
    reference = training_step(case)
    for place, block in enumerate(case.model.transformer_blocks):
        block.register_forward_pre_hook(lambda *_, place=place: ran.append(place))
    engine = GradientEngine(policy=BlockPolicy() if is_given else policy, skip_dead_ops=False)
    scope = checkpoint_blocks(
        case.model, LISTS, gradient_checkpoint_forward, True, True, policy=policy if is_given else None
    )
    with gradient_engine(engine):
        # The policy of the engine in scope is asked for when the scope is entered, which is here.
        assert training_step(case, scope) == reference
    assert ran == [0, 1, 2, *reversed(recomputed)]
    assert engine.report().blocks_checkpointed == len(recomputed)
    assert engine.report().tensors_offloaded > 0


def test_without_the_hook_the_blocks_are_run_by_their_forward() -> None:
    """Chroma's hook drops the mask."""
    case, engine = chroma(), GradientEngine()
    lists = ("transformer_blocks", "single_transformer_blocks")
    scope = checkpoint_blocks(case.model, lists, gradient_checkpoint_forward, True, True, by_hook=False)
    with gradient_engine(engine):
        assert training_step(case, scope) == training_step(case)
    assert engine.report().blocks_recomputed == len(blocks_of(case.model, lists))


def test_lists_that_leave_blocks_out_are_an_error() -> None:
    case = chroma()
    scope = checkpoint_blocks(case.model, LISTS, gradient_checkpoint_forward, True, False)
    with pytest.raises(ValueError, match=r"block \d was called in a model of \d blocks"):
        training_step(case, scope)


def in_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(call).result()


def test_a_block_of_a_block_is_treated_alike_in_a_recompute_on_another_thread() -> None:
    engine = GradientEngine(policy=BlockPolicy(select="first_k", n=1, selected=KEEP, others=RECOMPUTE))
    weight = torch.rand(4, requires_grad=True)

    def outer(y: Tensor) -> Tensor:
        return gradient_checkpoint_forward(lambda z: z.sin().exp().exp(), True, False, y) * weight

    with gradient_engine(engine):
        loss = block_runner(2, True, False)(1, outer, weight.cos()).sum()
    in_thread(loss.backward)
    expected = torch.autograd.grad((weight.cos().sin().exp().exp() * weight).sum(), weight)
    assert torch.equal(weight.grad, expected[0])


def test_a_block_of_a_block_is_selected_whatever_the_strategy_of_the_outer_one() -> None:
    engine, x = GradientEngine(policy=BlockPolicy(select="only", blocks=(7,))), torch.rand(4)

    def inner(y: Tensor) -> Tensor:
        return y.sin()

    def outer(y: Tensor) -> Tensor:
        return gradient_checkpoint_forward(inner, True, False, y) * 2

    kept = BlockPolicy(select="first_k", n=1, selected=KEEP, others=RECOMPUTE)
    x.requires_grad_()
    with gradient_engine(engine):
        run = block_runner(2, True, False, policy=kept)
        loss = run(1, outer, run(0, outer, x)).sum()
    # As autograd does for a GPU: its threads have no scope around them.
    in_thread(loss.backward)
    # Of the two outer ones the second is recomputed, and both inner ones, that of the second with it.
    assert engine.report().blocks_run == 5
    assert engine.report().blocks_checkpointed == 4
    expected = torch.autograd.grad((2 * (2 * x.sin()).sin()).sum(), x)
    assert torch.equal(x.grad, expected[0])


@pytest.mark.parametrize("flags", ALL_FLAGS)
def test_the_flags_are_those_of_the_engine_in_scope(flags: tuple[bool, bool]) -> None:
    off = {"use_gradient_checkpointing": False, "use_gradient_checkpointing_offload": False}
    on = dict(zip(off, flags, strict=True))
    with gradient_engine(GradientEngine(**on)):
        assert gradient_flags() == on
    assert gradient_flags() == off
