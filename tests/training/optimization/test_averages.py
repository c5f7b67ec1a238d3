"""The moving average of an adapter: its formula, what it is swapped in for, and how it is continued."""

import pytest
import torch
from torch import nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.training.optimization.averages import MovingAverage


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    layers[0].requires_grad_(False)
    return layers


def train(layers: nn.Module, averaged: MovingAverage, values: list[float]) -> None:
    for value in values:
        with torch.no_grad():
            layers[1].weight.fill_(value)
        averaged.update()


def test_the_average_follows_the_first_steps_closely_and_then_slowly() -> None:
    layers = model()
    averaged = MovingAverage(layers, decay=0.15)
    train(layers, averaged, [1.0, 2.0, 3.0])
    # Decays 0 (the first value), 2/11 cut to 0.15, 0.15.
    expected = 0.15 * (0.15 * 1 + 0.85 * 2) + 0.85 * 3
    assert averaged.tensors()["1.weight"].unique().item() == pytest.approx(expected)
    assert averaged.num_updates == 3


def test_only_what_is_trained_is_averaged() -> None:
    assert set(MovingAverage(model(), decay=0.9).tensors()) == {"1.weight", "1.bias"}


def test_the_models_own_weights_are_back_bit_for_bit_also_after_an_error() -> None:
    layers = model()
    averaged = MovingAverage(layers, decay=0.9)
    train(layers, averaged, [1.0, 2.0])
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
    layers, values = model(), torch.linspace(0.1, 0.9, 20).tolist()
    whole = MovingAverage(layers, decay=0.9)
    train(layers, whole, values)

    first, second, forgetful = (MovingAverage(layers, decay=0.9) for _ in range(3))
    train(layers, first, values[:7])
    second.load({name: tensor.clone() for name, tensor in first.tensors().items()}, first.num_updates)
    train(layers, forgetful, values[:7])
    forgetful.restart()
    fresh = MovingAverage(layers, decay=0.9)
    for averaged in (second, forgetful, fresh):
        train(layers, averaged, values[7:])
    assert torch.equal(whole.tensors()["1.weight"], second.tensors()["1.weight"])
    assert torch.equal(fresh.tensors()["1.weight"], forgetful.tensors()["1.weight"])
    assert not torch.equal(whole.tensors()["1.weight"], forgetful.tensors()["1.weight"])


def test_the_average_of_another_adapter_is_refused() -> None:
    averaged = MovingAverage(model(), decay=0.9)
    with pytest.raises(UserError, match="not those of this adapter"):
        averaged.load({"1.weight": torch.zeros(2, 2)}, 3)
