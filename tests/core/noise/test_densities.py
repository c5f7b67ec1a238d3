"""Quantile functions against diffusers' sampler, the paper's densities and the ends of the range."""

import math
from statistics import NormalDist

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.core.noise import TimestepDensity, loss_weight, shift_sigma, sigma_from_uniform

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


def test_logit_normal_has_the_stated_moments() -> None:
    logit = torch.logit(sigma_from_uniform(MIDPOINTS, "logit_normal", logit_mean=0.4, logit_std=0.8).double())
    assert logit.mean().item() == pytest.approx(0.4, abs=1e-3)
    assert logit.std().item() == pytest.approx(0.8, abs=1e-3)


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
