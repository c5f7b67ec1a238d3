"""The learning rate against schedulers of diffusers that are really stepped, and at its edges."""

import math

import pytest
import torch
from diffusers.optimization import get_scheduler

from diffsynth_lite.errors import UserError
from diffsynth_lite.training.optimization.optimizers import learning_rate_schedule

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
def test_a_warm_up_rises_evenly_from_its_first_step_to_the_base(name: str) -> None:
    rate = learning_rate_schedule(name, base=BASE, warmup_steps=4, total_steps=10)
    assert [rate(step) for step in range(5)] == pytest.approx(
        [BASE * part for part in (0.25, 0.5, 0.75, 1, 1)]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup_steps", [0, 19])
def test_no_step_of_a_run_has_a_rate_of_zero(name: str, warmup_steps: int) -> None:
    rate = learning_rate_schedule(name, base=BASE, warmup_steps=warmup_steps, total_steps=20)
    assert all(rate(step) > 0 for step in range(20))


@pytest.mark.parametrize("name", NAMES)
def test_past_the_end_the_rate_stays_where_it_was(name: str) -> None:
    rate = learning_rate_schedule(name, base=BASE, warmup_steps=2, total_steps=10)
    assert {rate(step) for step in (10, 11, 17, 1000)} == {rate(9)}


def test_shapes_have_their_closed_forms() -> None:
    def middle(name: str) -> float:
        return learning_rate_schedule(name, base=1.0, warmup_steps=10, total_steps=110)(35)

    assert middle("constant") == 1
    assert middle("linear") == 0.75
    assert middle("cosine") == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert middle("cosine_with_restarts") == middle("cosine")
    assert middle("polynomial") == pytest.approx(0.75, abs=1e-7)


def test_the_rate_does_not_depend_on_which_steps_were_asked_for_before() -> None:
    rate = learning_rate_schedule("cosine", base=BASE, warmup_steps=3, total_steps=30)
    forward = [rate(step) for step in range(30)]
    assert [rate(step) for step in reversed(range(30))] == forward[::-1]


@pytest.mark.parametrize(("warmup_steps", "total_steps"), [(10, 10), (11, 10), (0, 0), (-1, 10)])
def test_a_warm_up_that_leaves_no_step_is_refused(warmup_steps: int, total_steps: int) -> None:
    with pytest.raises(
        UserError, match=rf"warmup_steps {warmup_steps} must be less than train\.steps {total_steps}"
    ):
        learning_rate_schedule("linear", base=BASE, warmup_steps=warmup_steps, total_steps=total_steps)


def test_a_polynomial_that_starts_below_its_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"1e-08 with train\.lr_scheduler polynomial"):
        learning_rate_schedule("polynomial", base=1e-8, warmup_steps=0, total_steps=10)
