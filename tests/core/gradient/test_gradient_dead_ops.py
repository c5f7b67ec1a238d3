"""Products on which no gradient depends are left out of the recompute, and only these."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gradient_models import (
    Case,
    Step,
    flux,
    qwen_image,
    qwen_image_with_lora,
    sdxl_unet,
    training_step,
    wan,
)
from peft import LoraConfig
from test_gradient_attention import CountedOperators
from torch import Tensor, nn

from diffsynth_lite.core.gradient import (
    GradientEngine,
    GradientReport,
    block_runner,
    blocks_run_by,
    gradient_checkpoint_forward,
    gradient_engine,
    known_dead_calls,
)
from diffsynth_lite.core.gradient import dead_ops as dead_ops_module
from diffsynth_lite.core.gradient.signature import block_signature, call_signature


def step_of(case: Case, engine: GradientEngine, **kwargs: Any) -> tuple[Step, GradientReport]:
    engine.start_report()
    with gradient_engine(engine):
        run = block_runner(len(case.block_names), True, False)
        step = training_step(case, blocks_run_by(case.model, run), **kwargs)
    return step, engine.report()


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make_case", [qwen_image, flux, wan, sdxl_unet])
def test_no_bit_changes_in_any_architecture(make_case: Callable[[], Case], frozen: bool) -> None:
    case = make_case()
    if frozen:
        case.model.requires_grad_(False)
        for name, parameter in case.model.named_parameters():
            parameter.requires_grad_("to_q" in name)
    reference, engine = training_step(case), GradientEngine()
    for _ in range(2):
        step, report = step_of(case, engine)
        assert step == reference
    if frozen:
        assert report.dead_ops_skipped > 0


def test_in_lora_training_the_last_products_of_both_feed_forward_parts_are_skipped() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    step_of(case, engine)
    counts = {}
    for name, each in (("skipping", engine), ("running", GradientEngine(skip_dead_ops=False))):
        with CountedOperators() as operators:
            step, report = step_of(case, each)
        assert step == training_step(case)
        counts[name] = operators.counts["aten::mm"] + operators.counts["aten::addmm"]
    # Of each of the 3 blocks: the image's frozen product and its adapter's second one, and the text's.
    assert counts["running"] - counts["skipping"] == 9
    assert report.dead_ops_skipped == 0
    assert step_of(case, engine)[1].dead_ops_skipped == 9


def test_what_is_dead_is_found_anew_when_other_parameters_train() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    step_of(case, engine)
    # The gates learn now: they multiply what had been dead.
    case.model.requires_grad_(True)
    step, report = step_of(case, engine)
    assert step == training_step(case)
    assert report.dead_ops_skipped < 9
    case.model.disable_adapters()
    step, _ = step_of(case, engine)
    assert step == training_step(case)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
def test_freezing_and_switching_adapters_between_steps_changes_no_bit() -> None:
    case, engine = qwen_image_with_lora(), GradientEngine()
    case.model.add_adapter(LoraConfig(r=2, target_modules=["img_mod.1", "to_q"]), adapter_name="gates")
    skipped = []
    for adapters in ("default", "gates", ["default", "gates"], "gates", "default"):
        case.model.set_adapter(adapters)
        for frozen in ("nothing", "img_mod"):
            for name, parameter in case.model.named_parameters():
                if frozen in name:
                    parameter.requires_grad_(False)
            step, report = step_of(case, engine)
            assert step == training_step(case)
            skipped.append(report.dead_ops_skipped)
    assert len(set(skipped)) > 2


def test_a_block_without_dead_products_is_looked_at_again_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_dead_calls, "_RECOMPUTES_UNTIL_NEXT_LOOK", 3)
    case, engine, skipped = qwen_image_with_lora(), GradientEngine(), []
    gates = [p for name, p in case.model.named_parameters() if "_mod." in name]
    for gate in gates:
        gate.requires_grad_(True)
    step_of(case, engine)
    for gate in gates:
        gate.requires_grad_(False)
    for _ in range(4):
        step, report = step_of(case, engine)
        assert step == training_step(case)
        skipped.append(report.dead_ops_skipped)
    assert skipped == [0, 0, 0, 9]


def test_one_block_of_a_kind_and_input_size_is_run_once_more() -> None:
    case, engine, runs = qwen_image_with_lora(), GradientEngine(), []
    for block in case.model.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    numbers = []
    for inputs in (case.inputs, case.inputs, qwen_image(batch_size=1).inputs):
        step_of(Case(case.model, inputs, case.block_names), engine)
        numbers.append(len(runs))
        runs.clear()
    # Two kinds: the inputs of the first block need no gradient.
    assert numbers == [2 * 3 + 2, 2 * 3, 2 * 3 + 2]


def test_a_live_product_that_is_skipped_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = qwen_image_with_lora()
    # Saved tensors are overlooked, so that all seem dead.
    monkeypatch.setattr(dead_ops_module._Trace, "save", lambda self, tensor: None)
    torch.use_deterministic_algorithms(True)
    try:
        step, report = step_of(case, GradientEngine())
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.dead_ops_skipped > 9
    assert not all(torch.equal(step.gradients[name], g) for name, g in training_step(case).gradients.items())


class Tail(nn.Module):
    """A block whose last product is dead, unless something before the end of the block reads it."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.read = read
        self.gate = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        product = self.last(self.first(x).sin())
        self.read(product)
        return x + self.gate * product


READS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "nothing": (lambda product: None, 1),
    "its shape": (lambda product: product.shape, 1),
    "a value": (lambda product: product.sum().item(), 0),
    "all values": (lambda product: product.detach().tolist(), 0),
    "a change in place": (lambda product: product.add_(1), 0),
    "a use that is saved": (lambda product: product.exp(), 0),
}


@pytest.mark.parametrize("name", READS)
def test_a_product_that_is_read_is_not_skipped(name: str) -> None:
    read, num_skipped = READS[name]
    torch.manual_seed(0)
    block, engine, x = Tail(read), GradientEngine(), torch.randn(3, 4, requires_grad=True)

    def gradient(flag: bool) -> Tensor:
        with gradient_engine(engine):
            loss = gradient_checkpoint_forward(block, flag, False, x).square().sum()
        return torch.autograd.grad(loss, block.first.weight)[0]

    assert torch.equal(gradient(True), gradient(False))
    assert engine.report().dead_ops_skipped == num_skipped


CHANGES: dict[str, Callable[[Tail], Any]] = {
    "a parameter trains": lambda block: block.gate.requires_grad_(True),
    "a setting": lambda block: setattr(block, "reads", True),
    "a list of names": lambda block: setattr(block, "active", ["read"]),
    "train mode": lambda block: block.eval(),
    "another activation": lambda block: setattr(block, "part", nn.GELU()),
    "another kind of object": lambda block: setattr(block, "read", READS),
    "a hook": lambda block: block.first.register_forward_hook(lambda *_: None),
    "a removed part": lambda block: delattr(block, "part"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_calls_that_may_run_other_operators_are_told_apart(name: str) -> None:
    block, other = Tail(lambda product: None), Tail(lambda product: None)
    for each in (block, other):
        each.reads, each.active, each.part = False, [], nn.SiLU()
    assert block_signature(block) == block_signature(other)
    CHANGES[name](block)
    assert block_signature(block) != block_signature(other)


def test_blocks_that_are_compiled_or_hold_other_parameters_are_not_followed() -> None:
    block = Tail(lambda product: None)
    assert block_signature(nn.Sequential(block)) is not None
    assert block_signature(nn.Sequential(torch.compile(block, backend="eager"))) is None
    block.gate = nn.Parameter(torch.ones(4).as_subclass(Marked))
    assert block_signature(block) is None


def test_calls_with_other_arguments_are_told_apart_or_not_followed() -> None:
    x = torch.ones(3, 4)
    arguments = [((1,), {}), ((2,), {}), ((), {"a": 1}), (([1],), {}), ((None,), {})]
    assert len({call_signature([x], each) for each in arguments}) == len(arguments)
    tensors = [x, x[:1], x.double(), x.t(), torch.ones(3, 4, requires_grad=True)]
    assert len({call_signature([each], ((), {})) for each in tensors}) == len(tensors)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = call_signature([x], ((), {}))
    assert under_autocast != call_signature([x], ((), {})) == call_signature([x + 1], ((), {}))
    assert call_signature([x], ((object(),), {})) is None
    assert call_signature([nn.Parameter(x).as_subclass(Marked)], ((), {})) is None


class Marked(Tensor):
    """Stands for sharded and quantized tensors."""


def test_outside_of_an_engine_nothing_is_searched_each_time_anew() -> None:
    case, runs = qwen_image_with_lora(), []
    for block in case.model.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: runs.append(1))
    training_step(case, blocks_run_by(case.model, block_runner(3, True, False)))
    assert len(runs) == 2 * 3


def test_random_numbers_are_as_if_nothing_had_been_searched() -> None:
    case = qwen_image_with_lora()
    torch.manual_seed(5)
    expected = torch.rand(3)
    training_step(case)
    after_plain = torch.rand(3)
    assert not torch.equal(expected, after_plain)
    step_of(case, GradientEngine())
    assert torch.equal(torch.rand(3), after_plain)


def test_no_activation_is_kept_while_dead_products_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    save = dead_ops_module._Trace.save
    monkeypatch.setattr(dead_ops_module._Trace, "save", lambda self, tensor: saved.append(save(self, tensor)))
    step_of(qwen_image_with_lora(), GradientEngine())
    assert len(saved) > 50
    assert set(saved) == {None}


def test_functions_that_are_no_modules_are_left_alone() -> None:
    layer, engine = nn.Linear(4, 4).requires_grad_(False), GradientEngine()
    x = torch.randn(2, 4, requires_grad=True)
    with gradient_engine(engine):
        gradient_checkpoint_forward(lambda x: layer(x.sin()), True, False, x).sum().backward()
    assert engine.report().dead_ops_skipped == 0
