"""Shares of the noise levels against closed formulas, and against what is drawn."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch

from diffsynth_lite.core.noise import (
    LossByTenth,
    TimestepDensity,
    draw_of_level,
    level_shares,
    mixed_shares,
    sigma_from_uniform,
)

TENTHS = [tenth / 10 for tenth in range(1, 10)]
# Levels come in float32, whose spacing below 1 is 6e-8; a shift of s makes s times that of the draws.
ROUNDING = 2e-6


def quantiles(
    density: TimestepDensity = "uniform", shift: float = 1.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda draws: sigma_from_uniform(draws, density, shift=shift)


@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, math.exp(0.8), 32.16])
def test_uniform_draws_that_are_shifted_have_the_closed_distribution(shift: float) -> None:
    found = level_shares(quantiles(shift=shift))
    # Undone, the shift s of a level v is v / (s - (s - 1) v).
    undone = [v / (shift - (shift - 1) * v) for v in (tenth / 10 for tenth in range(11))]
    for tenth, share in enumerate(found.tenths):
        assert share == pytest.approx(undone[tenth + 1] - undone[tenth], abs=ROUNDING)
    # The integral of s u / (1 + (s - 1) u) over u.
    mean = 0.5 if shift == 1 else shift / (shift - 1) * (1 - math.log(shift) / (shift - 1))
    assert found.mean == pytest.approx(mean, abs=ROUNDING)
    assert found.below_half == pytest.approx(1 / (1 + shift), abs=ROUNDING)


@pytest.mark.parametrize("shift", [1.0, 2.2, 5.0])
def test_a_logit_normal_density_that_is_shifted_has_the_distribution_of_the_normal(shift: float) -> None:
    found = level_shares(quantiles("logit_normal", shift))
    bounds = [
        0.0,
        *(0.5 * math.erfc((math.log(shift) - math.log(v / (1 - v))) / math.sqrt(2)) for v in TENTHS),
        1.0,
    ]
    for tenth, share in enumerate(found.tenths):
        assert share == pytest.approx(bounds[tenth + 1] - bounds[tenth], abs=ROUNDING)
    assert level_shares(quantiles("logit_normal")).mean == pytest.approx(0.5, abs=ROUNDING)


@pytest.mark.parametrize("density", get_args(TimestepDensity))
@pytest.mark.parametrize("shift", [1.0, 4.0])
def test_shares_are_those_of_many_draws(density: TimestepDensity, shift: float) -> None:
    levels = quantiles(density, shift)
    drawn = levels((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    counts = torch.histc(drawn.double(), bins=10, min=0, max=1) / len(drawn)
    found = level_shares(levels)
    torch.testing.assert_close(torch.tensor(found.tenths, dtype=torch.float64), counts, rtol=0, atol=2e-5)
    assert found.mean == pytest.approx(drawn.double().mean().item(), abs=1e-5)
    assert sum(found.tenths) == pytest.approx(1, abs=1e-12)


def test_levels_outside_a_range_get_no_steps() -> None:
    found = level_shares(lambda draws: 0.55 + 0.2 * draws)
    expected = [0, 0, 0, 0, 0, 0.25, 0.5, 0.25, 0, 0]
    assert list(found.tenths) == pytest.approx(expected, abs=1e-9)
    assert (found.below_half, found.mean) == pytest.approx((0, 0.65))


def test_a_mixture_weighs_its_parts() -> None:
    low, high = (level_shares(lambda draws, start=start: start + 0.1 * draws) for start in (0.0, 0.9))
    mixed = mixed_shares([(3.0, low), (1.0, high), (0.0, low)])
    assert list(mixed.tenths) == pytest.approx([0.75, *[0] * 8, 0.25], abs=1e-9)
    assert mixed.mean == pytest.approx(0.75 * 0.05 + 0.25 * 0.95)


def test_the_draw_of_a_level_is_found_in_densities_that_grow_and_that_fall() -> None:
    assert draw_of_level(lambda draws: draws**2, 0.25) == pytest.approx(0.5)
    assert draw_of_level(lambda draws: 1 - draws, 0.2) == pytest.approx(0.8)
    assert draw_of_level(lambda draws: 0.5 + 0.1 * draws, 0.2) == 0
    assert draw_of_level(lambda draws: 0.5 - 0.1 * draws, 0.2) == pytest.approx(1)


@pytest.mark.parametrize(
    ("density", "shift", "mean", "below_half"),
    [
        ("uniform", 1.88, 0.604, 0.35),
        ("uniform", 3.16, 0.684, 0.24),
        ("uniform", 7.56, 0.797, 0.12),
        ("uniform", 16, 0.870, 0.06),
        ("uniform", 32.16, 0.917, 0.03),
        ("logit_normal", 1, 0.500, 0.50),
        ("logit_normal", 1.88, 0.628, 0.26),
        ("logit_normal", 3.16, 0.723, 0.13),
        ("logit_normal", 5, 0.794, 0.05),
    ],
)
def test_means_and_halves_are_those_of_another_program(
    density: TimestepDensity, shift: float, mean: float, below_half: float
) -> None:
    found = level_shares(quantiles(density, shift))
    # A shift is given here with three digits.
    assert found.mean == pytest.approx(mean, abs=1e-3)
    assert found.below_half == pytest.approx(below_half, abs=6e-3)


@pytest.mark.parametrize(
    ("boundary", "density", "shift", "above"),
    [
        (0.875, "uniform", 3, 0.300),
        (0.875, "uniform", 5, 0.417),
        (0.875, "uniform", 12, 0.632),
        (0.875, "logit_normal", 3, 0.198),
        (0.875, "logit_normal", 12, 0.705),
        (0.9, "uniform", 5, 0.357),
        (0.9, "logit_normal", 5, 0.278),
    ],
)
def test_the_part_above_a_boundary_is_that_of_another_program(
    boundary: float, density: TimestepDensity, shift: float, above: float
) -> None:
    assert 1 - draw_of_level(quantiles(density, shift), boundary) == pytest.approx(above, abs=6e-4)


def test_losses_are_added_up_by_tenth_until_they_are_taken() -> None:
    losses, cpu = LossByTenth(), torch.device("cpu")
    grows = torch.ones(3, requires_grad=True)
    losses.add(torch.tensor([0.0, 0.1, 0.95]), torch.tensor([1.0, 2.0, 4.0]) * grows)
    losses.add(torch.tensor([1.0, 0.05, 0.5]), torch.tensor([8.0, math.nan, math.inf]))
    sums, counts = losses.take(cpu)
    assert sums.tolist() == [1, 2, *[0] * 7, 12]
    assert counts.tolist() == [1, 1, *[0] * 7, 2]
    assert not sums.requires_grad
    assert losses.take(cpu).tolist() == [[0] * 10] * 2
    for _ in range(1000):
        losses.add(torch.tensor([0.25]), torch.tensor([0.5]))
    assert losses.take(cpu)[:, 2].tolist() == [500, 1000]


def test_losses_are_added_up_without_waiting_for_the_device() -> None:
    """On the meta device there is no number to wait for: asking for one raises."""
    losses, device = LossByTenth(), torch.device("meta")
    for _ in range(100):
        losses.add(torch.zeros(3, device=device), torch.zeros(3, device=device))
    totals = losses.take(device)
    assert totals.shape == (2, 10)
    with pytest.raises(RuntimeError, match="meta"):
        totals.tolist()
