"""With its outputs saved, attention runs once a block and step, and no bit changes."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_models import (
    Case,
    flux,
    forward,
    gradients,
    qwen_image_with_lora,
    sdxl_unet,
    training_step,
    wan,
)
from lazy_backend import LazyBackend
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    BlockStrategy,
    GradientEngine,
    block_runner,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)

KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
MATH = "aten::_softmax"


class CountedOperators(TorchDispatchMode):
    """Scope that counts the operators that really run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def saving(save_attention: str, **settings: Any) -> GradientEngine:
    policy = BlockPolicy(selected=BlockStrategy(save_attention=save_attention))
    return GradientEngine(policy=policy, skip_dead_ops=False, **settings)


def counted_step(case: Case, engine: GradientEngine) -> tuple[Any, Counter[str]]:
    with gradient_engine(engine), CountedOperators() as operators:
        run = block_runner(len(case.block_names), True, False)
        step = training_step(case, intercept_blocks(case.model, run))
    return step, operators.counts


@pytest.mark.parametrize("save_attention", ["keep", "park"])
@pytest.mark.parametrize(
    ("make_case", "calls"), [(qwen_image_with_lora, 3), (flux, 4), (wan, 4), (sdxl_unet, 16)]
)
def test_attention_runs_once_when_it_is_saved_and_twice_when_not(
    make_case: Callable[[], Case], calls: int, save_attention: str
) -> None:
    case = make_case()
    reference, twice = counted_step(case, saving("no"))
    engine = saving(save_attention)
    step, once = counted_step(case, engine)
    assert step == reference == training_step(case)
    assert (once[KERNEL], twice[KERNEL]) == (calls, 2 * calls)
    assert once[f"{KERNEL}_backward"] == twice[f"{KERNEL}_backward"] == calls
    assert engine.report().attention_saved == calls


def test_what_is_saved_is_the_output_and_a_number_for_each_row() -> None:
    case = qwen_image_with_lora()
    # 3 blocks, batch 2, 2 heads, 20 + 7 tokens: 16 channels and the logarithm of a sum, fp32.
    size = 3 * 2 * 2 * 27 * (16 + 1) * 4
    for place, other in (("keep", "park"), ("park", "keep")):
        engine = saving(place)
        counted_step(case, engine)
        report = engine.report()
        found = {"keep": report.attention_bytes_kept, "park": report.attention_bytes_offloaded}
        assert found == {place: size, other: 0}


def test_outputs_below_min_bytes_stay_on_the_device() -> None:
    engine = saving("park", min_bytes=1024)
    counted_step(qwen_image_with_lora(), engine)
    report = engine.report()
    assert report.attention_bytes_kept == 3 * 2 * 2 * 27 * 4
    assert report.attention_bytes_offloaded == 3 * 2 * 2 * 27 * 16 * 4
    assert report.not_offloaded == {}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("resident", "prefetched"), [(0, 0), (1, 1), (2, 3)])
def test_offloaded_outputs_leave_and_return_with_their_block(
    resident: int, prefetched: int, offload: bool
) -> None:
    case, backend = qwen_image_with_lora(), LazyBackend()
    engine = GradientEngine(
        policy=BlockPolicy(selected=BlockStrategy(offload=True, save_attention="park")),
        backend=backend,
        resident_blocks=resident,
        prefetched_blocks=prefetched,
    )
    with gradient_engine(engine):
        # The first pass shows which tensors the blocks share.
        for _ in range(2):
            engine.start_report()
            run = block_runner(len(case.block_names), True, offload)
            assert training_step(case, intercept_blocks(case.model, run)) == training_step(case)
    report = engine.report()
    inputs_offloaded = report.tensors_offloaded - 3 * 2
    assert (inputs_offloaded > 0) == offload
    assert (report.bytes_offloaded > report.attention_bytes_offloaded > 0) == offload
    # Each tensor came back once, ahead of its use; without residents and prefetch it had been away.
    assert report.late_prefetches == (0 if resident else report.tensors_offloaded)
    backend.finish()
    assert engine.host_pool.num_bytes_lent == 0


def test_outputs_for_which_there_is_no_host_memory_stay_on_the_device() -> None:
    case, engine = qwen_image_with_lora(), saving("park", backend=LazyBackend(host_bytes=0))
    step, _ = counted_step(case, engine)
    assert step == training_step(case)
    report = engine.report()
    assert (report.attention_bytes_offloaded, report.tensors_offloaded) == (0, 0)
    assert (
        report.attention_bytes_kept == report.not_offloaded["host memory refused by the system"].num_bytes > 0
    )


@pytest.mark.parametrize("save_attention", ["keep", "park"])
def test_a_retained_graph_and_another_live_one_get_their_own_outputs(save_attention: str) -> None:
    case = qwen_image_with_lora(batch_size=1)
    other = Case(case.model, qwen_image_with_lora(batch_size=2).inputs, case.block_names)
    expected = [training_step(each).gradients for each in (case, other)]
    engine = saving(save_attention)
    with gradient_engine(engine):
        losses = []
        for each in (case, other):
            with intercept_blocks(case.model, block_runner(3, True, False)):
                losses.append(forward(case.model, each.inputs).square().mean())
    for _ in range(2):
        for loss, gradient in zip(losses, expected, strict=True):
            case.model.zero_grad(set_to_none=True)
            loss.backward(retain_graph=True)
            found = gradients(case.model)
            assert all(torch.equal(found[name], value) for name, value in gradient.items())


@pytest.mark.parametrize("runs_backward", [True, False])
def test_kept_outputs_go_with_their_graph(runs_backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, engine, kept = qwen_image_with_lora(), saving("keep"), []
    save = engine.save_attention

    def watched(tensor: Tensor, *, offload: bool) -> Callable[[], Tensor]:
        kept.append(weakref.ref(tensor))
        return save(tensor, offload=offload)

    monkeypatch.setattr(engine, "save_attention", watched)
    with gradient_engine(engine), intercept_blocks(case.model, block_runner(3, True, False)):
        loss = forward(case.model, case.inputs).square().mean()
    assert [ref() is None for ref in kept] == [False] * 6
    if runs_backward:
        loss.backward()
    del loss
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * 6


class Attention(nn.Module):
    """A block whose attention is followed by dropout."""

    def __init__(self, dropout_p: float = 0.0, *, mask_learns: bool = False) -> None:
        super().__init__()
        self.dropout_p = dropout_p
        self.query = nn.Linear(8, 8)
        self.mask = nn.Parameter(torch.zeros(4, 4), requires_grad=mask_learns)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x)
        attended = scaled_dot_product_attention(q, x, x, self.mask, self.dropout_p)
        return nn.functional.dropout(attended, 0.5).sin()


@pytest.mark.parametrize("settings", [{"dropout_p": 0.5}, {"mask_learns": True}])
def test_attention_with_dropout_or_without_a_fused_kernel_runs_again(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block, x = Attention(**settings), torch.randn(2, 1, 4, 8, requires_grad=True)

    def gradient(engine: GradientEngine, flag: bool) -> Tensor:
        torch.manual_seed(3)
        with gradient_engine(engine):
            loss = gradient_checkpoint_forward(block, flag, False, x).sum()
        return torch.autograd.grad(loss, block.query.weight)[0]

    engine = saving("keep")
    assert torch.equal(gradient(engine, True), gradient(engine, False))
    assert engine.report().attention_saved == 0
    assert engine.report().attention_not_saved == 1


def test_an_output_that_is_not_the_saved_one_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case, engine = qwen_image_with_lora(), saving("keep")
    save = engine.save_attention
    monkeypatch.setattr(
        engine,
        "save_attention",
        lambda tensor, *, offload: save(tensor + 1e-3 * tensor.abs(), offload=offload),
    )
    assert counted_step(case, engine)[0] != training_step(case)
