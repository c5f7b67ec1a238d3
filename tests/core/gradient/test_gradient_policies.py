"""Which blocks a policy selects, what it does to them, and that it changes no bit of values and gradients."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from gradient_models import (
    ALL_FLAGS,
    Case,
    Step,
    chroma,
    flux,
    qwen_image,
    qwen_image_with_lora,
    sdxl_unet,
    training_step,
    wan,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.gradient import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    GradientReport,
    block_runner,
    blocks_in,
    blocks_of,
    checkpoint_blocks,
    count_blocks,
    gradient_checkpoint_forward,
    gradient_engine,
    gradient_flags,
    intercept_blocks,
)

SELECTIONS = {
    "all": BlockPolicy(),
    "every_n": BlockPolicy(select="every_n", n=2),
    "skip": BlockPolicy(select="skip", blocks=(1,)),
    "only": BlockPolicy(select="only", blocks=(2, 0)),
    "first_k": BlockPolicy(select="first_k", n=2),
    "last_k": BlockPolicy(select="last_k", n=1),
}
SELECTED = {  # of 3 blocks
    "all": [0, 1, 2],
    "every_n": [0, 2],
    "skip": [0, 2],
    "only": [0, 2],
    "first_k": [0, 1],
    "last_k": [2],
}
STRATEGIES = {
    "recompute": RECOMPUTE,
    "offload": OFFLOAD,
    "keep attention": BlockStrategy(save_attention="keep"),
    "offload attention": BlockStrategy(save_attention="park"),
    "offload all": BlockStrategy(offload=True, save_attention="park"),
    "plain checkpoint": BlockStrategy(checkpoint=lambda run, *x: checkpoint(run, *x, use_reentrant=False)),
}

# Selection and strategy are independent: each selection with two strategies and the reverse, 12 of 36 pairs.
SELECTION_WITH_STRATEGY = [
    (name, list(STRATEGIES)[(place + shift) % len(STRATEGIES)])
    for shift in (0, 3)
    for place, name in enumerate(SELECTIONS)
]


def policy_step(
    case: Case, policy: BlockPolicy, *, flags: tuple[bool, bool] = (True, True), **kwargs: Any
) -> tuple[Step, GradientReport]:
    """A training step under a policy, and the report of it."""
    engine = GradientEngine(policy=policy)
    blocks = (
        blocks_of(case.model, ["transformer_blocks", "single_transformer_blocks"])
        if is_chroma(case)
        else None
    )
    last_products = ("img_mlp.net.2", "ff.net.2", "ffn.net.2", "conv2")
    with gradient_engine(engine):
        run = block_runner(len(case.block_names), *flags, unused_matmuls=last_products)
        step = training_step(case, intercept_blocks(case.model, run, blocks=blocks), **kwargs)
    return step, engine.report()


def is_chroma(case: Case) -> bool:
    return type(case.model).__name__.startswith("Chroma")


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize("make_case", [qwen_image, qwen_image_with_lora, flux, wan, sdxl_unet, chroma])
def test_no_strategy_changes_a_step_of_any_architecture(
    make_case: Callable[[], Case], strategy: BlockStrategy
) -> None:
    case = make_case()
    reference = training_step(case)
    step, report = policy_step(case, BlockPolicy(selected=strategy))
    assert step == reference
    assert report.blocks_recomputed == len(case.block_names)
    assert bool(report.attention_saved) == (strategy.save_attention != "no")
    assert (report.bytes_offloaded > report.attention_bytes_offloaded) == strategy.offload
    assert not (strategy.checkpoint and report.dead_ops_skipped)


@pytest.mark.parametrize(("name", "strategy"), SELECTION_WITH_STRATEGY)
def test_a_policy_treats_the_blocks_that_it_selects_and_changes_no_bit(name: str, strategy: str) -> None:
    case, policy = qwen_image_with_lora(), replace(SELECTIONS[name], selected=STRATEGIES[strategy])
    assert policy.selection(3) == SELECTED[name]
    step, report = policy_step(case, policy)
    assert step == training_step(case)
    assert report.blocks_run == 3
    assert report.blocks_checkpointed == report.blocks_recomputed == len(SELECTED[name])


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_gradients_accumulate_over_batches_of_different_sizes(strategy: BlockStrategy, amp: bool) -> None:
    case = qwen_image_with_lora(batch_size=1)
    larger = Case(case.model, qwen_image(batch_size=3).inputs, case.block_names)
    policy = BlockPolicy(select="first_k", n=2, selected=strategy)
    with torch.autocast("cpu", torch.bfloat16) if amp else nullcontext():
        training_step(case)
        reference = training_step(larger, keep_gradients=True)
        policy_step(case, policy)
        assert policy_step(larger, policy, keep_gradients=True)[0] == reference


def test_blocks_may_have_two_strategies_at_once() -> None:
    case = qwen_image_with_lora()
    policy = BlockPolicy(select="first_k", n=1, selected=OFFLOAD, others=BlockStrategy(save_attention="keep"))
    step, report = policy_step(case, policy)
    assert step == training_step(case)
    assert report.blocks_recomputed == 3
    assert report.attention_saved == 2
    assert (
        report.tensors_offloaded == policy_step(case, BlockPolicy(select="first_k", n=1))[1].tensors_offloaded
    )


@pytest.mark.parametrize("flags", [(False, False), (True, False), (False, True), (True, True)])
def test_the_switches_permit_what_the_policy_asks_for(flags: tuple[bool, bool]) -> None:
    case = qwen_image_with_lora()
    step, report = policy_step(case, SELECTIONS["every_n"], flags=flags)
    assert step == training_step(case)
    assert report.blocks_checkpointed == (2 if any(flags) else 0)
    assert bool(report.tensors_offloaded) == flags[1]


def test_a_block_called_by_itself_is_a_selected_block() -> None:
    provided, x = [], torch.rand(4, requires_grad=True)

    def provider(run: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        provided.append([tensor.shape for tensor in tensors])
        return checkpoint(run, *tensors, use_reentrant=False)

    policy = BlockPolicy(select="only", blocks=(5,), selected=BlockStrategy(checkpoint=provider))
    with gradient_engine(GradientEngine(policy=policy)):
        gradient_checkpoint_forward(
            lambda x, by: x * by["y"], True, True, x, by={"y": x + 1}
        ).sum().backward()
    assert provided == [[x.shape, x.shape]]
    assert torch.equal(x.grad, 2 * x + 1)


def test_more_calls_than_blocks_are_an_error() -> None:
    case = qwen_image(num_layers=2)
    with pytest.raises(ValueError, match="block 1 was called in a model of 1 blocks"):
        training_step(case, intercept_blocks(case.model, block_runner(1, True, False)))


def run_of_three(**settings: Any) -> None:
    block_runner(3, True, True, policy=BlockPolicy(**settings))


NOTHING = r"nothing to offload|of your own"


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (BlockPolicy, {"select": "every_n"}, "n is None"),
        (BlockPolicy, {"select": "every_n", "n": 0}, "at least 1"),
        (BlockPolicy, {"select": "all", "n": 2}, "only they"),
        (BlockPolicy, {"select": "only"}, r"blocks is \(\)"),
        (BlockPolicy, {"select": "first_k", "n": 1, "blocks": (1,)}, "only they"),
        (BlockPolicy, {"select": "skip", "blocks": (1, 1)}, "named once"),
        (BlockPolicy, {"select": "skip", "blocks": (-1,)}, "count from 0"),
        (run_of_three, {"select": "only", "blocks": (1, 3)}, r"blocks \[3\]; the model has blocks 0 to 2"),
        (run_of_three, {"select": "skip", "blocks": (0, 1, 2)}, "selects none of 3 blocks"),
        (run_of_three, {"select": "first_k", "n": 4}, "first_k of 4 blocks; the model has 3"),
        (run_of_three, {"select": "every_n", "n": 4}, "every_n of 4 blocks; the model has 3"),
        (BlockStrategy, {"recompute": False, "offload": True}, NOTHING),
        (BlockStrategy, {"recompute": False, "save_attention": "keep"}, NOTHING),
        (BlockStrategy, {"recompute": False, "checkpoint": checkpoint}, NOTHING),
        (BlockStrategy, {"offload": True, "checkpoint": checkpoint}, NOTHING),
        (BlockStrategy, {"save_attention": "park", "checkpoint": checkpoint}, NOTHING),
    ],
)
def test_what_contradicts_itself_or_does_not_fit_the_model_is_refused(
    make: Callable[..., object], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_policies_are_values() -> None:
    assert BlockPolicy(select="only", blocks=(1,)) == BlockPolicy(select="only", blocks=(1,))
    assert len({BlockPolicy(), BlockPolicy(), SELECTIONS["skip"]}) == 2
    assert SELECTIONS["skip"].strategy(1, 3) == KEEP


def test_blocks_are_counted_through_wrappers() -> None:
    model = flux().model
    lists = ["transformer_blocks", "single_transformer_blocks"]
    assert count_blocks(model, lists) == 4
    compiled, wrapped = torch.nn.Module(), torch.nn.Module()
    compiled._orig_mod, wrapped.module = model, compiled
    assert count_blocks(wrapped, lists) == 4
    found = blocks_in(wrapped, lists)
    assert all(block is other for block, other in zip(found, blocks_of(model, lists), strict=True))


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
