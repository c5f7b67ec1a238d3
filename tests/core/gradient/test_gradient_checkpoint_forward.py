"""Values and gradients are the same under all switches, to the last bit."""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.utils import BaseOutput
from gradient_models import (
    ALL_FLAGS,
    Case,
    checkpointed_step,
    forward,
    gradients,
    qwen_image,
    qwen_image_with_lora,
    training_step,
    with_flags,
)
from torch import Tensor, nn

from diffsynth_lite.core.gradient import (
    GradientEngine,
    gradient_checkpoint_forward,
    gradient_engine,
    intercept_blocks,
)

CHECKPOINTED_FLAGS = ALL_FLAGS[1:]


@pytest.mark.parametrize("flags", ALL_FLAGS)
@pytest.mark.parametrize("make_case", [qwen_image, qwen_image_with_lora])
def test_a_step_does_not_depend_on_the_flags(make_case: Callable[[], Case], flags: tuple[bool, bool]) -> None:
    case = make_case()
    assert checkpointed_step(case, flags) == training_step(case)


def test_dropout_matters_to_the_gradients_that_are_compared() -> None:
    case = qwen_image_with_lora()
    with_dropout = training_step(case)
    case.model.eval()
    assert training_step(case) != with_dropout


@pytest.mark.parametrize("flags", CHECKPOINTED_FLAGS)
def test_a_step_under_autocast_does_not_depend_on_the_flags(flags: tuple[bool, bool]) -> None:
    case = qwen_image_with_lora()
    with torch.autocast("cpu", torch.bfloat16):
        reference = training_step(case)
        assert reference.output.dtype == torch.bfloat16
        assert checkpointed_step(case, flags) == reference


@pytest.mark.parametrize("flags", CHECKPOINTED_FLAGS)
def test_gradients_accumulate_over_batches_of_different_sizes(flags: tuple[bool, bool]) -> None:
    case = qwen_image_with_lora(batch_size=1)
    larger = Case(case.model, qwen_image(batch_size=3).inputs, case.block_names)
    training_step(case)
    reference = training_step(larger, keep_gradients=True)
    checkpointed_step(case, flags)
    assert checkpointed_step(larger, flags, keep_gradients=True) == reference


@pytest.mark.parametrize("flags", CHECKPOINTED_FLAGS)
def test_a_retained_graph_can_be_run_backward_twice(flags: tuple[bool, bool]) -> None:
    case = qwen_image_with_lora()
    once = training_step(case).gradients
    case.model.zero_grad(set_to_none=True)
    with intercept_blocks(case.model, with_flags(flags)):
        loss = forward(case.model, case.inputs).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    # Doubling is exact in floating point.
    assert all(torch.equal(grad, 2 * once[name]) for name, grad in gradients(case.model).items())


@pytest.mark.parametrize("flags", CHECKPOINTED_FLAGS)
@pytest.mark.parametrize("first", [0, 1])
def test_two_graphs_can_be_alive_at_once(flags: tuple[bool, bool], first: int) -> None:
    case = qwen_image_with_lora(batch_size=1)
    inputs = [case.inputs, qwen_image(batch_size=2).inputs]
    references = [training_step(Case(case.model, one, case.block_names)).gradients for one in inputs]
    with intercept_blocks(case.model, with_flags(flags)):
        losses = [forward(case.model, one).square().mean() for one in inputs]
    for index in (first, 1 - first):
        case.model.zero_grad(set_to_none=True)
        losses[index].backward()
        found = gradients(case.model)
        assert all(torch.equal(found[name], value) for name, value in references[index].items())


@pytest.mark.parametrize("flags", CHECKPOINTED_FLAGS)
def test_gradients_of_gradients_do_not_depend_on_the_flags(flags: tuple[bool, bool]) -> None:
    def penalty(flags: tuple[bool, bool]) -> Tensor:
        weight = torch.linspace(-1, 1, 8, requires_grad=True)
        loss = gradient_checkpoint_forward(
            lambda x, scale: (x * scale["by"]).sin().exp(), *flags, weight, {"by": weight * 2}
        )
        (gradient,) = torch.autograd.grad(loss.sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), weight)
        return second

    assert torch.equal(penalty(flags), penalty((False, False)))


def test_an_exception_in_a_block_leaves_no_hook_behind() -> None:
    engine = GradientEngine()
    weight = torch.ones(3, requires_grad=True)

    def fails(x: Tensor) -> Tensor:
        raise ArithmeticError("in the block")

    with gradient_engine(engine), pytest.raises(ArithmeticError, match="in the block"):
        gradient_checkpoint_forward(fails, True, True, x=weight * 2)
    offloaded = engine.report().tensors_offloaded
    (weight * weight).sum().backward()
    assert engine.report().tensors_offloaded == offloaded == 1


def test_a_step_after_an_exception_is_as_if_it_had_not_been() -> None:
    case = qwen_image_with_lora()
    reference = training_step(case)

    def fails_in_the_second(index: int, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if index == 1:
            kwargs["hidden_states"] = None
        return gradient_checkpoint_forward(block, True, True, *args, **kwargs)

    with pytest.raises(TypeError, match="hidden_states"), intercept_blocks(case.model, fails_in_the_second):
        forward(case.model, case.inputs)
    assert training_step(case) == reference
    assert checkpointed_step(case, (True, True)) == reference


@pytest.mark.parametrize(("flags", "grad"), [((False, False), True), *((f, False) for f in ALL_FLAGS)])
def test_without_flags_or_without_grad_it_is_the_plain_call(flags: tuple[bool, bool], grad: bool) -> None:
    x, nested = torch.ones(2, requires_grad=True), {"pair": (torch.ones(2), [1])}
    calls = []

    def block(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "its own value"

    with torch.set_grad_enabled(grad):
        assert gradient_checkpoint_forward(block, *flags, x, nested=nested) == "its own value"
    ((args, kwargs),) = calls
    assert args[0] is x
    assert kwargs["nested"] is nested


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Modulation:
    shift: Any
    scale: Any
    derived: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "derived", (self.scale, "from init"))


@dataclass
class Output(BaseOutput):
    sample: Any
    label: Any = None


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, None, b),
    "list": lambda a, b: [a, 3, b],
    "dict": lambda a, b: {"a": a, "b": b},
    "named tuple": Pair,
    "ordered dict": lambda a, b: OrderedDict(z=a, y="text", x=b),
    "defaultdict": lambda a, b: defaultdict(list, a=a, b=b),
    "frozen dataclass": Modulation,
    "diffusers output": Output,
    "nested": lambda a, b: [Modulation(Pair(a, {"rotary": (b, a)}), Output(b)), {0: [(b,)]}],
}


@pytest.mark.parametrize("flags", CHECKPOINTED_FLAGS)
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_tensors_in_containers_are_seen_and_the_containers_keep_their_type(
    make: Callable[[Tensor, Tensor], Any], flags: tuple[bool, bool]
) -> None:
    a, b = torch.rand(4, requires_grad=True), torch.rand(4, requires_grad=True)
    seen: list[Any] = []

    def block(x: Tensor, *, nested: Any) -> Tensor:
        seen.append(type(nested))
        for tensor in tensors_in(nested):
            x = x * tensor.sin()
        return x

    engine = GradientEngine()
    with gradient_engine(engine):
        gradient_checkpoint_forward(block, *flags, a.exp(), nested=make(a, b)).sum().backward()
    found = a.grad, b.grad
    a.grad = b.grad = None
    block(a.exp(), nested=make(a, b)).sum().backward()
    assert torch.equal(found[0], a.grad)
    assert torch.equal(found[1], b.grad)
    assert seen == [type(make(a, b))] * 3
    assert engine.report().tensors_offloaded == (3 if flags[1] else 0)
    assert engine.report().bytes_offloaded == (3 * 16 if flags[1] else 0)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a nested value, found without the code under test."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, Modulation):
        value = [value.shift, value.scale, value.derived]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


@pytest.mark.parametrize("flags", CHECKPOINTED_FLAGS)
def test_a_tensor_given_twice_stays_one_tensor(flags: tuple[bool, bool]) -> None:
    x = torch.rand(4, requires_grad=True)
    same: list[bool] = []

    def block(a: Tensor, b: list[Tensor]) -> Tensor:
        same.append(a is b[0])
        return a * b[0]

    engine = GradientEngine()
    with gradient_engine(engine):
        gradient_checkpoint_forward(block, *flags, x, b=[x]).sum().backward()
    assert same == [True, True]
    assert torch.equal(x.grad, 2 * x)
    assert engine.report().tensors_offloaded == (1 if flags[1] else 0)


def test_a_block_that_empties_its_argument_gets_it_whole_in_the_recompute() -> None:
    x, options = torch.rand(4, requires_grad=True), {"scale": torch.rand(4)}

    def block(x: Tensor, options: dict[str, Tensor]) -> Tensor:
        return x * options.pop("scale")

    gradient_checkpoint_forward(block, True, True, x, options).sum().backward()
    assert torch.equal(x.grad, options["scale"])


def test_the_report_of_a_backward_pass_on_another_thread_reaches_the_engine() -> None:
    x, engine = torch.rand(4, requires_grad=True), GradientEngine()
    with gradient_engine(engine):
        loss = gradient_checkpoint_forward(torch.sin, True, True, x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad, x.cos())
    assert engine.report().blocks_recomputed == 1
