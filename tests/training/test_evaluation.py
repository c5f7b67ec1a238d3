"""The fixed-noise loss repeats exactly and leaves the model as it was."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch

from diffsynth_lite.data import Bucket
from diffsynth_lite.training.evaluation import FixedNoiseLoss, ValidationItem, evaluation_mode
from diffsynth_lite.training.objective import DenoisingObjective

SMALL, LARGE = Bucket(width=24, height=16), Bucket(width=40, height=16)


class Recorder:
    """Stands in for the objective: remembers what it is asked for; an item's error is its noise level."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.noise_levels = SimpleNamespace(evenly=lambda part: part)
        self.noise: list[torch.Tensor] = []
        self.sigma: list[float] = []
        self.batches: list[object] = []

    def errors(self, model: torch.nn.Module, latents, noise, sigma, conditioning, loss_mask) -> torch.Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        assert len(latents) == len(noise) == len(sigma) == len(conditioning)
        self.batches.append((tuple(latents.shape), None if loss_mask is None else tuple(loss_mask.shape)))
        self.noise.extend(noise)
        self.sigma.extend(sigma.tolist())
        return sigma


def fixed_noise_loss(num_items: int, batch_size: int) -> tuple[FixedNoiseLoss, Recorder]:
    recorder = Recorder()
    items = [
        ValidationItem(bucket=SMALL, latents=torch.zeros(2, 3), conditioning={}) for _ in range(num_items)
    ]
    loss = FixedNoiseLoss(name="loss", items=items, objective=recorder, seed=0, batch_size=batch_size)
    return loss, recorder


def test_the_levels_cover_the_path_evenly_whatever_the_batch_size() -> None:
    for batch_size in (1, 3, 8):
        loss, recorder = fixed_noise_loss(4, batch_size)
        assert loss.measure(torch.nn.Identity()) == {"loss": pytest.approx(0.5)}
        assert recorder.sigma == pytest.approx([0.125, 0.375, 0.625, 0.875])


def test_each_item_has_its_own_noise_and_always_the_same() -> None:
    (first, seen), (second, again) = fixed_noise_loss(3, 1), fixed_noise_loss(3, 2)
    first.measure(torch.nn.Identity())
    second.measure(torch.nn.Identity())
    assert all(torch.equal(*pair) for pair in zip(seen.noise, again.noise, strict=True))
    assert not torch.equal(seen.noise[0], seen.noise[1])


def test_items_of_another_size_or_with_a_mask_are_measured_in_batches_of_their_own() -> None:
    recorder = Recorder()
    small = ValidationItem(bucket=SMALL, latents=torch.zeros(2, 3), conditioning={})
    large = ValidationItem(bucket=LARGE, latents=torch.zeros(2, 5), conditioning={})
    masked = dataclasses.replace(large, loss_mask=torch.ones(1, 5))
    elsewhere = dataclasses.replace(masked, loss_mask=torch.ones(1, 1))
    items = [small, small, large, masked, masked, masked, elsewhere, small]
    loss = FixedNoiseLoss(name="loss", items=items, objective=recorder, seed=0, batch_size=2)
    assert loss.measure(torch.nn.Identity()) == {"loss": pytest.approx(0.5)}
    assert recorder.batches == [
        ((2, 2, 3), None),
        ((1, 2, 5), None),
        ((2, 2, 5), (2, 1, 5)),
        ((1, 2, 5), (1, 1, 5)),
        ((1, 2, 5), (1, 1, 1)),
        ((1, 2, 3), None),
    ]


def test_items_that_start_from_pictures_of_another_size_are_measured_in_batches_of_their_own() -> None:
    recorder = Recorder()
    items = [
        ValidationItem(
            bucket=dataclasses.replace(SMALL, inputs=inputs), latents=torch.zeros(2, 3), conditioning={}
        )
        for inputs in (((32, 64),), ((64, 32),), ((64, 32),))
    ]
    FixedNoiseLoss(name="loss", items=items, objective=recorder, seed=0, batch_size=4).measure(
        torch.nn.Identity()
    )
    assert [latents for latents, _ in recorder.batches] == [(1, 2, 3), (2, 2, 3)]


def test_without_items_there_is_no_metric() -> None:
    loss, _ = fixed_noise_loss(0, 1)
    assert loss.measure(torch.nn.Identity()) == {}


def test_the_training_mode_comes_back_also_after_an_error() -> None:
    model = torch.nn.Dropout()
    for training in (True, False):
        model.train(training)
        modes = []
        with contextlib.suppress(KeyError), evaluation_mode(model):
            modes.append(model.training)
            raise KeyError
        assert modes == [False]
        assert model.training is training
    assert torch.is_grad_enabled()


def test_the_stand_in_has_the_objectives_interface() -> None:
    assert {"device", "errors", "noise_levels"} <= {
        *DenoisingObjective.__dataclass_fields__,
        *vars(DenoisingObjective),
    }
