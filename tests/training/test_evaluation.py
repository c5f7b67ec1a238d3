"""The fixed-noise loss repeats exactly and leaves the model as it was."""

import contextlib

import pytest
import torch

from diffsynth_lite.training.evaluation import FixedNoiseLoss, ValidationItem, evaluation_mode
from diffsynth_lite.training.objective import FlowMatching


class Recorder:
    """Stands in for the objective: remembers what it is asked for; an item's error is its noise level."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.noise: list[torch.Tensor] = []
        self.sigma: list[float] = []

    def velocity_errors(self, model: torch.nn.Module, latents, noise, sigma, conditioning) -> torch.Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        assert len(latents) == len(noise) == len(sigma) == len(conditioning)
        self.noise.extend(noise)
        self.sigma.extend(sigma.tolist())
        return sigma


def fixed_noise_loss(num_items: int, batch_size: int) -> tuple[FixedNoiseLoss, Recorder]:
    recorder = Recorder()
    items = [ValidationItem(latents=torch.zeros(2, 3), conditioning={}) for _ in range(num_items)]
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
    assert {"device", "velocity_errors"} <= {*FlowMatching.__dataclass_fields__, *vars(FlowMatching)}
