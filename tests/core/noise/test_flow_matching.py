"""The path from data to noise, against diffusers and its own geometry."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.core.noise import add_noise, velocity

SHAPES = st.sampled_from([(3,), (1, 5), (2, 4, 2), (2, 4, 2, 3), (2, 4, 1, 2, 3), (3, 1, 2, 1, 2, 2)])


def whole_numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Whole numbers, on which float32 arithmetic with dyadic sigmas is exact."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


@given(SHAPES, st.integers(0, 10_000), st.data())
def test_one_euler_step_along_the_true_velocity_returns_the_latents(
    shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    latents, noise = whole_numbers(shape, seed), whole_numbers(shape, seed + 1)
    sixteenths = data.draw(st.lists(st.integers(0, 16), min_size=shape[0], max_size=shape[0]))
    sigma = torch.tensor(sixteenths) / 16
    noisy = add_noise(latents, noise, sigma)
    for index, level in enumerate(sigma):
        step_back = noisy[index] - level * velocity(latents, noise)[index]
        assert torch.equal(step_back, latents[index])


@given(SHAPES, st.integers(0, 10_000))
def test_the_path_starts_at_the_latents_and_ends_at_the_noise(shape: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    latents, noise = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    assert torch.equal(add_noise(latents, noise, torch.zeros(shape[0])), latents)
    assert torch.equal(add_noise(latents, noise, torch.ones(shape[0])), noise)


def test_noise_is_added_as_diffusers_scheduler_adds_it() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    latents, noise = torch.randn(4, 2, 3, 3), torch.randn(4, 2, 3, 3)
    timesteps = scheduler.timesteps[[0, 250, 500, 999]]
    expected = scheduler.scale_noise(latents, timesteps, noise)
    # The scheduler adds the two terms in the other order.
    torch.testing.assert_close(add_noise(latents, noise, timesteps / 1000), expected, rtol=0, atol=1e-6)


def test_half_precision_inputs_are_mixed_in_float32() -> None:
    latents, noise = torch.randn(2, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    sigma = torch.tensor([0.3, 0.6])
    exact = add_noise(latents.float(), noise.float(), sigma)
    assert torch.equal(add_noise(latents, noise, sigma), exact)
    assert torch.equal(velocity(latents, noise), noise.float() - latents.float())
    assert not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize("sigma", [torch.zeros(1), torch.zeros(3), torch.zeros(2, 1), torch.tensor(0.5)])
def test_a_sigma_that_is_not_one_a_sample_is_refused(sigma: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="one a sample"):
        add_noise(torch.zeros(2, 4), torch.zeros(2, 4), sigma)


def test_noise_that_would_be_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match="noise has shape"):
        velocity(torch.zeros(2, 4), torch.zeros(1, 4))
    with pytest.raises(ValueError, match="noise has shape"):
        add_noise(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(2))
