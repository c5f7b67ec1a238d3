"""Quantile functions against diffusers' sampler, the paper's densities and the ends of the range."""

import math
from statistics import NormalDist

import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.core.noise import loss_weight, sigma_from_uniform

DENSITIES = ("uniform", "logit_normal", "mode", "cosmap")
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


@pytest.mark.parametrize("settings", [{"logit_std": 0.0}, {"logit_std": math.nan}, {"logit_std": -1.0}])
def test_a_logit_std_that_is_not_positive_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="logit_std"):
        sigma_from_uniform(torch.rand(2), "logit_normal", **settings)


@pytest.mark.parametrize("scale", [-1.01, 1.76, math.nan])
def test_a_mode_scale_that_would_leave_the_range_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="mode_scale"):
        sigma_from_uniform(torch.rand(2), "mode", mode_scale=scale)


def test_an_unknown_density_is_refused() -> None:
    with pytest.raises(ValueError, match="'normal'"):
        sigma_from_uniform(torch.rand(2), "normal")
