"""Optimizers by name, and learning rates against schedulers of diffusers that are really stepped."""

import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.optimization import get_scheduler
from torch import Tensor, nn

from diffsynth_lite.config.model import LoraSettings
from diffsynth_lite.config.train import TrainSettings
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import LoraSize
from diffsynth_lite.lora.kinds import TrainedTensor
from diffsynth_lite.training.layer_groups import LayerGroup
from diffsynth_lite.training.optimization.averages import AverageOfOptimizer, has_modes
from diffsynth_lite.training.optimization.optimizer_state import OptimizerFacts
from diffsynth_lite.training.optimization.optimizers import (
    build_average,
    build_optimizer,
    examine_optimizer,
    learned_rate,
    learning_rate_schedule,
)

CPU = torch.device("cpu")
SHAPES = {TrainedTensor((4, 24)): 3, TrainedTensor((16, 4), starts_at_zero=True): 2}
NUM_FIRST, NUM_SECOND = 3 * 4 * 24, 2 * 16 * 4


def config_of(**train: Any) -> Any:
    return SimpleNamespace(train=TrainSettings(**train), lora=LoraSettings())


def group_of(config: Any, name: str | None = None, *, layers: Sequence[str] = (), **own: float) -> LayerGroup:
    rates = {"learning_rate": config.train.learning_rate, "weight_decay": config.train.weight_decay}
    return LayerGroup(name=name, layers=tuple(layers), size=LoraSize(4, 4.0), **(rates | own))


def examined(**train: Any) -> OptimizerFacts:
    config = config_of(**train)
    return examine_optimizer(config, [group_of(config)], SHAPES, CPU)


def made(config: Any, model: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(config, model, [group_of(config)])


@pytest.mark.parametrize(
    ("settings", "num_bytes"),
    [
        ({"optimizer": "adamw"}, 8 * (NUM_FIRST + NUM_SECOND)),
        ({"optimizer": "muon"}, 4 * (NUM_FIRST + NUM_SECOND)),
        ({"optimizer": "adafactor"}, 4 * (3 * (4 + 24) + 2 * (16 + 4))),
        ({"optimizer": "prodigy", "learning_rate": 1.0}, 16 * NUM_FIRST + 12 * NUM_SECOND),
        ({"optimizer": "schedule_free"}, 8 * (NUM_FIRST + NUM_SECOND)),
        ({"optimizer": "torch.optim.SGD"}, 0),
        ({"optimizer": "adamw", "optimizer_options": {"amsgrad": True}}, 12 * (NUM_FIRST + NUM_SECOND)),
    ],
)
def test_what_an_optimizer_keeps_is_counted_by_a_step_of_it(settings: dict[str, Any], num_bytes: int) -> None:
    averages = settings["optimizer"] == "schedule_free"
    assert examined(**settings) == OptimizerFacts(state_bytes=num_bytes, has_average=averages)


def test_eight_bits_of_a_matrix_are_saved_and_loaded() -> None:
    pytest.importorskip("bitsandbytes")
    config = config_of(optimizer="adamw8bit")
    facts = examine_optimizer(config, [group_of(config)], {TrainedTensor((8, 1024)): 2}, CPU)
    assert facts.state_bytes < 2.6 * 2 * 8 * 1024


class Forgetful(torch.optim.SGD):
    """Keeps where it is next to its state."""

    num_steps = 0

    def step(self, closure: None = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.num_steps
        super().step(closure)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimizer": f"{__name__}.Forgetful"},
            f"train.optimizer: {__name__}.Forgetful does not continue exactly after its state was saved and",
        ),
        ({"optimizer": "torch.optim.LBFGS"}, "torch.optim.LBFGS cannot train a LoRA that is to be resumed"),
        ({"optimizer": "torch.optim.SparseAdam"}, "SparseAdam does not support dense gradients"),
        ({"optimizer": "torch.nn.Linear"}, "torch.nn.Linear is not a class of optimizers of torch"),
        ({"optimizer": "torch.optim.Adan"}, "torch.optim.Adan is not a class of optimizers of torch"),
        ({"optimizer": "no_package.Adan"}, "no_package.Adan needs no_package, which is not installed$"),
        (
            {"optimizer_options": {"amsgrd": True}},
            "train.optimizer_options: adamw has no amsgrd; did you mean amsgrad",
        ),
        (
            {"optimizer": "torch.optim.SGD", "optimizer_options": {"momentum": -1.0}},
            "train.optimizer_options: torch.optim.SGD refuses its settings: Invalid momentum value: -1.0",
        ),
        (
            {"optimizer": "torch.optim.Rprop", "weight_decay": 0.1},
            "train.weight_decay: torch.optim.Rprop takes none; leave it out",
        ),
        (
            {"optimizer": "schedulefree.SGDScheduleFree", "ema_decay": 0.9},
            "train.ema_decay: 0.9, and schedulefree.SGDScheduleFree trains an average already",
        ),
    ],
)
def test_an_optimizer_that_a_run_could_not_use_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        examined(**settings)


def test_what_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prodigyopt", None)
    with pytest.raises(UserError, match=r"train.optimizer: prodigy needs .*: pip install prodigyopt$"):
        examined(optimizer="prodigy", learning_rate=1.0)
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(
        UserError, match=r"muon is torch.optim.Muon, which torch .* does not have; install a later"
    ):
        examined(optimizer="muon")


def test_short_names_have_options_that_can_be_set_otherwise() -> None:
    layer = nn.Linear(3, 2, bias=False)
    muon = made(config_of(optimizer="muon"), layer)
    assert muon.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    plain = made(config_of(optimizer="muon", optimizer_options={"adjust_lr_fn": "original"}), layer)
    assert plain.param_groups[0]["adjust_lr_fn"] == "original"
    prodigy = {"optimizer": "prodigy", "learning_rate": 1.0, "optimizer_options": {"betas": [0.8, 0.99]}}
    for warmup_steps, is_safe in ((0, False), (5, True)):
        found = made(config_of(**prodigy, warmup_steps=warmup_steps), layer)
        assert found.param_groups[0]["safeguard_warmup"] is is_safe
        assert found.param_groups[0]["betas"] == (0.8, 0.99)
    assert learned_rate(found) == pytest.approx(1e-6)
    assert learned_rate(muon) is None


def test_the_average_of_an_optimizer_is_put_on_and_taken_off_without_a_trace() -> None:
    model = nn.Linear(5, 3, bias=False)
    optimizer = made(config_of(optimizer="schedule_free", learning_rate=0.1), model)
    assert has_modes(optimizer)
    average = build_average(config_of(optimizer="schedule_free"), model, optimizer)
    assert isinstance(average, AverageOfOptimizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        model.weight.grad = torch.randn(3, 5, generator=generator)
        optimizer.step()
    own, z = model.weight.detach().clone(), optimizer.state[model.weight]["z"]
    expected: Tensor = z + (own - z) / 0.9  # y = (1 - beta) z + beta x
    with average.applied():
        assert torch.allclose(model.weight, expected, atol=1e-6)
        applied = model.weight.detach().clone()
    assert torch.equal(model.weight, own)
    assert optimizer.param_groups[0]["train_mode"]
    assert torch.equal(average.tensors()["weight"], applied)
    assert math.isclose(float((applied - own).norm()), float((z - own).norm()) * (1 / 0.9 - 1), rel_tol=1e-4)


NAMES = ("constant", "linear", "cosine", "cosine_with_restarts", "polynomial")
BASE = 3e-4


def stepped_by_diffusers(name: str, *, warmup_steps: int, total_steps: int) -> list[float]:
    """Learning rates that a diffusers scheduler puts in its optimizer, one for each step from 0."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    name = "constant_with_warmup" if name == "constant" else name
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps)
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_the_rates_are_those_of_diffusers_with_the_warm_up_one_step_ahead(
    name: str, warmup_steps: int
) -> None:
    expected = stepped_by_diffusers(name, warmup_steps=warmup_steps, total_steps=20)
    rate = learning_rate_schedule(name, base=BASE, warmup_steps=warmup_steps, total_steps=20)
    assert [rate(step) for step in range(warmup_steps)] == expected[1 : warmup_steps + 1]
    assert [rate(step) for step in range(warmup_steps, 20)] == expected[warmup_steps:]


@pytest.mark.parametrize("name", NAMES)
def test_rates_rise_evenly_to_the_base_are_never_zero_and_stay_past_the_end(name: str) -> None:
    for warmup_steps, total_steps in ((0, 20), (4, 10), (19, 20)):
        rate = learning_rate_schedule(name, base=BASE, warmup_steps=warmup_steps, total_steps=total_steps)
        forward = [rate(step) for step in range(total_steps)]
        rising = [BASE * (step + 1) / warmup_steps for step in range(warmup_steps)]
        assert forward[: warmup_steps + 1] == pytest.approx([*rising, BASE])
        assert min(forward) > 0
        assert {rate(step) for step in (total_steps, total_steps + 7, 1000)} == {forward[-1]}
        assert [rate(step) for step in reversed(range(total_steps))] == forward[
            ::-1
        ]  # whatever was asked before


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(10, 10), (11, 10), (0, 0), (-1, 10)])
def test_a_warm_up_that_leaves_no_step_is_refused(warmup_steps: int, total_steps: int) -> None:
    with pytest.raises(
        UserError, match=rf"warmup_steps {warmup_steps} must be less than train\.steps {total_steps}"
    ):
        learning_rate_schedule("linear", base=BASE, warmup_steps=warmup_steps, total_steps=total_steps)


def test_a_polynomial_that_starts_below_its_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"1e-08 with train\.lr_scheduler polynomial"):
        learning_rate_schedule("polynomial", base=1e-8, warmup_steps=0, total_steps=10)
