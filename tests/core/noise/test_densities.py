"""Densities, shifts and shares of noise levels against diffusers, the paper and closed formulas."""

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import get_args

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from diffusers.training_utils import compute_density_for_timestep_sampling
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.core.noise.densities import (
    TimestepDensity,
    draw_of_level,
    level_shares,
    mixed_shares,
    resolution_mu,
    shift_sigma,
    sigma_from_uniform,
)
from diffsynth_lite.core.noise.losses import LossByTenth
from diffsynth_lite.core.noise.paths import loss_weight

DENSITIES = ("uniform", "logit_normal", "stretched_logit_normal", "mode", "cosmap")
MIDPOINTS = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.5, 0.7), (1.0, 2.0)])
def test_logit_normal_equals_diffusers_for_the_same_normal_draw(mean: float, std: float) -> None:
    reference = compute_density_for_timestep_sampling("logit_normal", 512, mean, std, generator=seeded())
    normal = torch.normal(0.0, 1.0, size=(512,), generator=seeded())
    uniform = torch.special.ndtr(normal.double())
    sigma = sigma_from_uniform(uniform, "logit_normal", logit_mean=mean, logit_std=std)
    # ndtri inverts ndtr only up to rounding, and diffusers works in float32 throughout.
    torch.testing.assert_close(sigma, reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", [-1.0, -0.3, 0.0, 0.8, 1.29, 1.75])
def test_mode_equals_diffusers_for_the_same_uniform_draw(scale: float) -> None:
    reference = compute_density_for_timestep_sampling("mode", 512, mode_scale=scale, generator=seeded())
    sigma = sigma_from_uniform(torch.rand(512, generator=seeded()), "mode", mode_scale=scale)
    # Ours is rounded once, from float64.
    torch.testing.assert_close(sigma, reference, rtol=0, atol=3e-7)


def test_uniform_returns_the_draw_as_diffusers_does() -> None:
    reference = compute_density_for_timestep_sampling("none", 512, generator=seeded())
    assert torch.equal(sigma_from_uniform(torch.rand(512, generator=seeded()), "uniform"), reference)


def test_cosmap_has_the_density_that_the_cosmap_loss_weight_states() -> None:
    """Drawing by CosMap is weighting by CosMap: for any function the two averages agree."""
    drawn = sigma_from_uniform(MIDPOINTS, "cosmap")
    sigma = MIDPOINTS.float()
    for function in (torch.square, torch.cos, torch.exp):
        by_density = function(drawn).mean()
        by_weight = (loss_weight(sigma, "cosmap") * function(sigma)).mean()
        torch.testing.assert_close(by_density, by_weight, rtol=1e-5, atol=0)


@pytest.mark.parametrize("draw", [1e-12, 0.3, 1 - 1e-12])
def test_a_draw_near_the_ends_keeps_its_precision(draw: float) -> None:
    expected = 1 / (1 + math.exp(-NormalDist().inv_cdf(draw)))
    sigma = sigma_from_uniform(torch.tensor([draw], dtype=torch.float64), "logit_normal")
    assert sigma.item() == pytest.approx(expected, rel=1e-6)


@given(
    st.sampled_from(DENSITIES),
    st.one_of(
        st.sampled_from([0.0, 5e-324, 2.0**-53, 2.0**-30, 1 - 2.0**-24, 1 - 2.0**-53]),
        st.floats(0, 1, exclude_max=True),
    ),
    st.floats(-20, 20),
    st.floats(1e-3, 20),
    st.floats(-1, 2 / (math.pi - 2)),
)
def test_sigma_stays_strictly_inside_the_unit_interval(
    density: str, draw: float, mean: float, std: float, scale: float
) -> None:
    uniform = torch.tensor([draw], dtype=torch.float64)
    sigma = sigma_from_uniform(uniform, density, logit_mean=mean, logit_std=std, mode_scale=scale)
    assert sigma.dtype == torch.float32
    assert 0 < sigma.item() < 1


def lightricks_draws(mean: float, std: float, count: int) -> torch.Tensor:
    """As the LTX-2 trainer draws them, with three random numbers each where ours has one; sorted."""
    generator = torch.Generator().manual_seed(0)
    normal, share = torch.empty(2, count, dtype=torch.float64)
    normal.normal_(generator=generator)
    share.uniform_(generator=generator)
    ends = torch.sigmoid(mean + std * torch.tensor([-2.5758, 3.0902], dtype=torch.float64))
    stretched = (torch.sigmoid(mean + std * normal) - ends[0]) / (ends[1] - ends[0])
    reflected = torch.where(stretched < 0.001, 0.002 - stretched, stretched).clamp(0, 1)
    uniform = 0.001 + 0.999 * torch.rand(count, dtype=torch.float64, generator=generator)
    return torch.where(share < 0.1, uniform, reflected).sort().values


@pytest.mark.parametrize(
    ("num_tokens", "std", "mean"),
    [
        *((85, 1.0, 0.579), (256, 1.0, 0.588), (1536, 1.0, 0.650), (4224, 1.0, 0.747)),
        *((6144, 1.0, 0.789), (14080, 1.0, 0.840), (1536, 0.5, None), (1536, 2.0, None)),
    ],
)
def test_the_stretched_density_is_that_of_a_million_draws_of_its_source(
    num_tokens: int, std: float, mean: float | None
) -> None:
    # Its line from 0.95 at 1024 tokens to 2.05 at 4096, and on.
    mu = 0.95 + (2.05 - 0.95) / 3072 * (num_tokens - 1024)
    reference = lightricks_draws(mu, std, 1_000_000)
    shares = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    # As a shift it is the same as in the mean: what is stretched is shifted already.
    by_mean, by_shift = (
        sigma_from_uniform(shares, "stretched_logit_normal", logit_std=std, **given)
        for given in ({"logit_mean": mu}, {"shift": math.exp(mu)})
    )
    assert torch.equal(by_mean, by_shift)
    assert mean is None or round(by_mean.double().mean().item(), 3) == mean
    # A share of a million draws has a standard error of at most 0.0005; 4 of them.
    found = torch.searchsorted(reference, by_mean.double()) / len(reference)
    below_the_cut = by_mean < 1 - 2.0**-23
    torch.testing.assert_close(found[below_the_cut], shares[below_the_cut].float(), rtol=0, atol=2e-3)
    assert (reference == 1).double().mean() == pytest.approx(
        (~below_the_cut).double().mean().item(), abs=2e-4
    )


def test_the_stretched_density_draws_nothing_below_a_thousandth_and_grows_with_the_draw() -> None:
    for mean, std in ((0.0, 1.0), (2.1, 1.0), (40.0, 1.0), (-40.0, 0.1), (0.0, 20.0)):
        levels = sigma_from_uniform(
            MIDPOINTS, "stretched_logit_normal", logit_mean=mean, logit_std=std
        ).double()
        assert levels.min() >= 0.001
        assert (levels.diff() >= 0).all()
        assert levels.max() > 0.9


def test_a_shift_moves_what_other_densities_draw() -> None:
    for density in ("uniform", "logit_normal", "mode", "cosmap"):
        assert torch.equal(
            sigma_from_uniform(MIDPOINTS, density, shift=3.0),
            shift_sigma(sigma_from_uniform(MIDPOINTS, density), 3.0),
        )


@pytest.mark.parametrize("density", ["logit_normal", "stretched_logit_normal"])
@pytest.mark.parametrize("std", [0.0, math.nan, -1.0])
def test_a_logit_std_that_is_not_positive_is_refused(density: TimestepDensity, std: float) -> None:
    with pytest.raises(ValueError, match="logit_std"):
        sigma_from_uniform(torch.rand(2), density, logit_std=std)


@pytest.mark.parametrize("scale", [-1.01, 1.76, math.nan])
def test_a_mode_scale_that_would_leave_the_range_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="mode_scale"):
        sigma_from_uniform(torch.rand(2), "mode", mode_scale=scale)


def test_an_unknown_density_is_refused() -> None:
    with pytest.raises(ValueError, match="'normal'"):
        sigma_from_uniform(torch.rand(2), "normal")


SIGMA = torch.linspace(0.001, 1, 999, dtype=torch.float64)


@pytest.mark.parametrize("mu", [-0.7, 0.0, 0.5, 0.8, 1.15, 2.05])
def test_the_schedulers_exponential_shift_is_the_static_one_by_the_exponential_of_mu(mu: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential")
    torch.testing.assert_close(shift_sigma(SIGMA, math.exp(mu)), scheduler.time_shift(mu, 1.0, SIGMA))


@pytest.mark.parametrize("shift", [0.5, 1.0, 2.2, 3.0, 5.0, 16.0])
def test_the_static_shift_equals_the_sigmas_of_a_scheduler_with_that_shift(shift: float) -> None:
    plain = FlowMatchEulerDiscreteScheduler(shift=1.0)
    shifted = FlowMatchEulerDiscreteScheduler(shift=shift)
    torch.testing.assert_close(shift_sigma(plain.sigmas, shift), shifted.sigmas)


@pytest.mark.parametrize("shift", [0.1, 1.0, 3.0, 50.0])
def test_the_ends_of_the_range_stay_where_they_are(shift: float) -> None:
    ends = torch.tensor([0.0, 1.0])
    assert torch.equal(shift_sigma(ends, shift), ends)


@given(st.floats(0, 1, width=32), st.floats(0.01, 100))
def test_a_shifted_sigma_stays_in_range(sigma: float, shift: float) -> None:
    assert 0 <= shift_sigma(torch.tensor(sigma), shift).item() <= 1


@pytest.mark.parametrize("shift", [0.0, -1.0, math.nan])
def test_a_shift_that_is_not_positive_is_refused(shift: float) -> None:
    with pytest.raises(ValueError, match="shift"):
        shift_sigma(SIGMA, shift)


@pytest.mark.parametrize("num_tokens", [64, 256, 1024, 4096, 6889])
@pytest.mark.parametrize(("base_shift", "max_shift"), [(0.5, 1.15), (0.95, 2.05)])
def test_mu_follows_the_line_of_diffusers_pipelines(
    num_tokens: int, base_shift: float, max_shift: float
) -> None:
    mu = resolution_mu(
        num_tokens, base_shift=base_shift, max_shift=max_shift, base_tokens=256, max_tokens=4096
    )
    assert mu == pytest.approx(calculate_shift(num_tokens, 256, 4096, base_shift, max_shift), rel=1e-12)


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
