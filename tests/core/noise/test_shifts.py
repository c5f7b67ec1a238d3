"""Shifts against diffusers' scheduler and pipelines, and their algebra."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.core.noise import exponential_shift, resolution_mu, shift_sigma

SIGMA = torch.linspace(0.001, 1, 999, dtype=torch.float64)


@pytest.mark.parametrize("mu", [-0.7, 0.0, 0.5, 0.8, 1.15, 2.05])
def test_the_exponential_shift_equals_the_scheduler_s(mu: float) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential")
    torch.testing.assert_close(exponential_shift(SIGMA, mu), scheduler.time_shift(mu, 1.0, SIGMA))


@pytest.mark.parametrize("mu", [-0.7, 0.0, 0.8, 2.05])
def test_the_exponential_shift_is_the_static_shift_by_the_exponential_of_mu(mu: float) -> None:
    static = math.exp(mu) * SIGMA / (1 + (math.exp(mu) - 1) * SIGMA)
    torch.testing.assert_close(exponential_shift(SIGMA, mu), static)


@pytest.mark.parametrize("shift", [0.5, 1.0, 2.2, 3.0, 5.0, 16.0])
def test_the_static_shift_equals_the_sigmas_of_a_scheduler_with_that_shift(shift: float) -> None:
    plain = FlowMatchEulerDiscreteScheduler(shift=1.0)
    shifted = FlowMatchEulerDiscreteScheduler(shift=shift)
    torch.testing.assert_close(shift_sigma(plain.sigmas, shift), shifted.sigmas)


@pytest.mark.parametrize("shift", [0.1, 1.0, 3.0, 50.0])
def test_the_ends_of_the_range_stay_where_they_are(shift: float) -> None:
    ends = torch.tensor([0.0, 1.0])
    assert torch.equal(shift_sigma(ends, shift), ends)
    assert torch.equal(exponential_shift(ends, math.log(shift)), ends)


@given(st.floats(0, 1, width=32), st.floats(0.01, 100))
def test_a_shifted_sigma_stays_in_range(sigma: float, shift: float) -> None:
    assert 0 <= shift_sigma(torch.tensor(sigma), shift).item() <= 1


def test_a_shift_and_its_reciprocal_undo_each_other() -> None:
    torch.testing.assert_close(shift_sigma(shift_sigma(SIGMA, 3.0), 1 / 3), SIGMA)


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
