"""Optimizer state by parameter name, and the moving average: exact round trips, and what is refused."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from torch import Tensor, nn

from diffsynth_lite.errors import CheckpointError, UserError
from diffsynth_lite.training.checkpoint.manifest import read_checkpoint
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.optimization.averages import MovingAverage
from diffsynth_lite.training.optimization.optimizer_state import load_optimizer, optimizer_tensors

Parameters = dict[str, nn.Parameter]
MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]

SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
}
OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    # SparseAdam wants sparse gradients; LBFGS wants a closure and keeps lists.
    and name not in ("Optimizer", "SparseAdam", "LBFGS")
)


def parameters() -> Parameters:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.weight": (4, 3), "b.weight": (2, 4), "frozen": (2, 2), "unused": (3, 3)}
    named = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    named["frozen"].requires_grad_(False)
    return named


def trained(named: Parameters) -> list[nn.Parameter]:
    return [parameter for parameter in named.values() if parameter.requires_grad]


def train(optimizer: torch.optim.Optimizer, named: Parameters, *, first: int, last: int) -> None:
    """Steps whose gradients depend on the step; ``unused`` never gets one."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for name in ("a.weight", "b.weight"):
            named[name].grad = torch.randn(named[name].shape, generator=generator)
        optimizer.step()


def adamw(groups: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def state_after(num_steps: int, make: MakeOptimizer = adamw) -> tuple[dict[str, Tensor], dict[str, Any]]:
    named = parameters()
    optimizer = make(trained(named))
    train(optimizer, named, first=0, last=num_steps)
    return optimizer_tensors(optimizer, named)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_optimizer_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    def make(groups: Iterable[Any]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
            groups, lr=0.01, **SETTINGS.get(name, {})
        )
        return optimizer

    uninterrupted = parameters()
    train(make(trained(uninterrupted)), uninterrupted, first=0, last=6)

    named = parameters()
    optimizer = make(trained(named))
    train(optimizer, named, first=0, last=3)
    tensors, document = optimizer_tensors(optimizer, named)
    path = CheckpointStore(tmp_path, keep=1).save(3, {"optimizer": tensors}, {"optimizer": document})
    checkpoint = read_checkpoint(path)
    fresh = make(trained(named))
    load_optimizer(fresh, named, checkpoint.tensors("optimizer"), checkpoint.documents["optimizer"])
    train(fresh, named, first=3, last=6)
    for key, parameter in uninterrupted.items():
        assert torch.equal(named[key], parameter)

    # The control: without its state the optimizer ends elsewhere.
    cold = parameters()
    train(make(trained(cold)), cold, first=0, last=3)
    train(make(trained(cold)), cold, first=3, last=6)
    assert not torch.equal(cold["a.weight"], uninterrupted["a.weight"])


def test_adamw_state_is_stored_under_parameter_names() -> None:
    tensors, document = state_after(2)
    keys = ("exp_avg", "exp_avg_sq", "step")
    assert set(tensors) == {f"{name}::{key}" for name in ("a.weight", "b.weight") for key in keys}
    assert tensors["a.weight::step"] == 2
    assert json.loads(json.dumps(document)) == document
    assert document["optimizer"] == "AdamW"
    assert document["parameters"]["unused"] == {"shape": [3, 3], "state": []}
    assert "frozen" not in document["parameters"]


def test_state_finds_its_parameters_in_another_order_and_grouping() -> None:
    tensors, document = state_after(2)
    named = parameters()
    groups = [{"params": [named["unused"], named["b.weight"]]}, {"params": [named["a.weight"]], "lr": 0.5}]
    optimizer = adamw(groups)
    load_optimizer(optimizer, named, tensors, document)
    for name in ("a.weight", "b.weight"):
        state = optimizer.state[named[name]]
        for key, value in state.items():
            assert torch.equal(value, tensors[f"{name}::{key}"])
    assert optimizer.state.get(named["unused"], {}) == {}


@pytest.mark.parametrize("make", [prodigyopt.Prodigy, schedulefree.AdamWScheduleFree])
def test_what_an_optimizer_estimates_in_a_group_is_stored_and_its_settings_are_not(
    make: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    named = parameters()
    optimizer = started(make(trained(named), lr=1.0, weight_decay=0.5))
    train(optimizer, named, first=0, last=3)
    tensors, document = optimizer_tensors(optimizer, named)
    path = CheckpointStore(tmp_path, keep=1).save(3, {"optimizer": tensors}, {"optimizer": document})
    checkpoint = read_checkpoint(path)
    fresh = started(make(trained(named), lr=0.25, weight_decay=0.125))
    load_optimizer(fresh, named, checkpoint.tensors("optimizer"), checkpoint.documents["optimizer"])
    (before,), (after,) = optimizer.param_groups, fresh.param_groups
    differing = {key for key in before if key != "params" and before[key] != after[key]}
    assert differing == {"lr", "weight_decay"}
    assert before["k"] == 3

    two_groups = make([{"params": [one]} for one in trained(named)], lr=1.0)
    with pytest.raises(CheckpointError, match="1 groups of parameters in the checkpoint and 3 in this run"):
        load_optimizer(two_groups, named, tensors, document)


def started(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """In training mode, where it has modes."""
    if isinstance(optimizer, schedulefree.AdamWScheduleFree):
        optimizer.train()
    return optimizer


def test_loaded_state_is_a_copy_and_settings_stay_those_of_the_optimizer_that_loads() -> None:
    tensors, document = state_after(2)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    named = parameters()
    optimizer = torch.optim.AdamW(trained(named), lr=0.5, weight_decay=0.25)
    load_optimizer(optimizer, named, tensors, document)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["weight_decay"] == 0.25
    train(optimizer, named, first=2, last=4)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def test_an_optimizer_that_has_not_stepped_has_nothing_to_store() -> None:
    tensors, document = state_after(0)
    assert tensors == {}
    named = parameters()
    load_optimizer(adamw(trained(named)), named, tensors, document)


def without(name: str) -> Callable[[Parameters, dict[str, Tensor]], None]:
    return lambda named, tensors: None if named.pop(name, None) is not None else tensors.__delitem__(name)


def with_new_shape(named: Parameters, tensors: dict[str, Tensor]) -> None:
    named["b.weight"] = nn.Parameter(torch.zeros(4, 2))


def with_new_parameter(named: Parameters, tensors: dict[str, Tensor]) -> None:
    named["c.weight"] = nn.Parameter(torch.zeros(4, 2))


def with_new_tensor(named: Parameters, tensors: dict[str, Tensor]) -> None:
    tensors["a.weight::max_exp_avg_sq"] = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("b.weight"), r"0 trained parameters missing \[\], 1 unexpected \['b.weight'\]"),
        (with_new_parameter, r"1 trained parameters missing \['c.weight'\], 0 unexpected"),
        (with_new_shape, r"b.weight has shape \[2, 4\] in the checkpoint and \[4, 2\] in the model"),
        (without("a.weight::exp_avg"), r"1 tensors missing \['a.weight::exp_avg'\]"),
        (with_new_tensor, r"1 unexpected \['a.weight::max_exp_avg_sq'\]"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(
    change: Callable[[Parameters, dict[str, Tensor]], None], message: str
) -> None:
    tensors, document = state_after(2)
    named = parameters()
    change(named, tensors)
    optimizer = adamw(trained(named))
    with pytest.raises(CheckpointError, match=message):
        load_optimizer(optimizer, named, tensors, document)
    assert not optimizer.state


def test_state_of_another_optimizer_is_refused() -> None:
    tensors, document = state_after(2)
    named = parameters()
    with pytest.raises(CheckpointError, match="of AdamW, this run uses Adam"):
        load_optimizer(torch.optim.Adam(trained(named)), named, tensors, document)


@pytest.mark.parametrize(
    ("kind", "option", "key"), [("AdamW", "amsgrad", "max_exp_avg_sq"), ("RMSprop", "centered", "grad_avg")]
)
def test_an_option_whose_state_the_checkpoint_lacks_is_refused(kind: str, option: str, key: str) -> None:
    make = getattr(torch.optim, kind)
    tensors, document = state_after(2, lambda groups: make(groups, lr=0.01))
    named = parameters()
    with pytest.raises(CheckpointError, match=f"the checkpoint has no {key}, which {option} of {kind} needs"):
        load_optimizer(make(trained(named), **{option: True}), named, tensors, document)


def test_a_parameter_without_a_name_is_refused() -> None:
    named = parameters()
    optimizer = adamw(trained(named))
    del named["b.weight"]
    with pytest.raises(ValueError, match=r"without a name, of shapes \[\(2, 4\)\]"):
        optimizer_tensors(optimizer, named)


def test_state_that_is_neither_tensor_nor_number_is_refused() -> None:
    named = {"w": nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.LBFGS(named.values())

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = named["w"].square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with pytest.raises(ValueError, match="LBFGS keeps al of w as a list"):
        optimizer_tensors(optimizer, named)


def two_layers() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    return layers


def train_to(layers: nn.Module, averaged: MovingAverage, values: list[float]) -> None:
    for value in values:
        with torch.no_grad():
            layers[1].weight.fill_(value)
        averaged.update()


def test_the_average_follows_the_first_steps_closely_and_then_slowly() -> None:
    layers = two_layers()
    averaged = MovingAverage(layers, decay=0.15)
    train_to(layers, averaged, [1.0, 2.0, 3.0])
    # Decays 0 (the first value), 2/11 cut to 0.15, 0.15.
    expected = 0.15 * (0.15 * 1 + 0.85 * 2) + 0.85 * 3
    assert averaged.tensors()["1.weight"].unique().item() == pytest.approx(expected)
    assert averaged.num_updates == 3


def test_only_what_is_trained_is_averaged() -> None:
    assert set(MovingAverage(two_layers(), decay=0.9).tensors()) == {"1.weight", "1.bias"}


def test_the_models_own_weights_are_back_bit_for_bit_also_after_an_error() -> None:
    layers = two_layers()
    averaged = MovingAverage(layers, decay=0.9)
    train_to(layers, averaged, [1.0, 2.0])
    average = averaged.tensors()["1.weight"].clone()

    def look_and_fail() -> None:
        with averaged.applied():
            assert torch.equal(layers[1].weight, average)
            raise KeyError

    with pytest.raises(KeyError):
        look_and_fail()
    assert layers[1].weight.unique().tolist() == [2.0]
    assert torch.equal(averaged.tensors()["1.weight"], average)


def test_a_continued_average_is_the_same_bit_for_bit_and_a_restarted_one_is_not() -> None:
    layers, values = two_layers(), torch.linspace(0.1, 0.9, 20).tolist()
    whole = MovingAverage(layers, decay=0.9)
    train_to(layers, whole, values)

    first, second, forgetful = (MovingAverage(layers, decay=0.9) for _ in range(3))
    train_to(layers, first, values[:7])
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()}, first.num_updates)
    train_to(layers, forgetful, values[:7])
    forgetful.restart()
    fresh = MovingAverage(layers, decay=0.9)
    for averaged in (second, forgetful, fresh):
        train_to(layers, averaged, values[7:])
    assert torch.equal(whole.tensors()["1.weight"], second.tensors()["1.weight"])
    assert torch.equal(fresh.tensors()["1.weight"], forgetful.tensors()["1.weight"])
    assert not torch.equal(whole.tensors()["1.weight"], forgetful.tensors()["1.weight"])


def test_the_average_of_another_adapter_is_refused() -> None:
    averaged = MovingAverage(two_layers(), decay=0.9)
    with pytest.raises(UserError, match="not those of this adapter"):
        averaged.load({"1.weight": torch.zeros(2, 2)}, 3)
