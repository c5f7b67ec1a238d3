"""The paths from data to noise and the weights of losses, against diffusers and closed formulas."""

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3, compute_snr
from hypothesis import given
from hypothesis import strategies as st

from diffsynth_lite.core.noise.paths import DiffusionPath, FlowMatchingPath, loss_weight

FLOW = FlowMatchingPath()
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
    noisy = FLOW.add_noise(latents, noise, sigma)
    for index, level in enumerate(sigma):
        step_back = noisy[index] - level * FLOW.target(latents, noise, sigma)[index]
        assert torch.equal(step_back, latents[index])


@given(SHAPES, st.integers(0, 10_000))
def test_the_path_starts_at_the_latents_and_ends_at_the_noise(shape: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    latents, noise = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    assert torch.equal(FLOW.add_noise(latents, noise, torch.zeros(shape[0])), latents)
    assert torch.equal(FLOW.add_noise(latents, noise, torch.ones(shape[0])), noise)


def test_noise_is_added_as_diffusers_scheduler_adds_it() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler()
    latents, noise = torch.randn(4, 2, 3, 3), torch.randn(4, 2, 3, 3)
    timesteps = scheduler.timesteps[[0, 250, 500, 999]]
    expected = scheduler.scale_noise(latents, timesteps, noise)
    # The scheduler adds the two terms in the other order.
    torch.testing.assert_close(FLOW.add_noise(latents, noise, timesteps / 1000), expected, rtol=0, atol=1e-6)


def test_half_precision_inputs_are_mixed_in_float32() -> None:
    latents, noise = torch.randn(2, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    sigma = torch.tensor([0.3, 0.6])
    exact = FLOW.add_noise(latents.float(), noise.float(), sigma)
    assert torch.equal(FLOW.add_noise(latents, noise, sigma), exact)
    assert torch.equal(FLOW.target(latents, noise, sigma), noise.float() - latents.float())
    assert not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize("sigma", [torch.zeros(1), torch.zeros(3), torch.zeros(2, 1), torch.tensor(0.5)])
def test_a_sigma_that_is_not_one_a_sample_is_refused(sigma: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="one a sample"):
        FLOW.add_noise(torch.zeros(2, 4), torch.zeros(2, 4), sigma)


def test_noise_that_would_be_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match="noise has shape"):
        FLOW.target(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(2))
    with pytest.raises(ValueError, match="noise has shape"):
        FLOW.add_noise(torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(2))


SHAPE = (5, 4, 3, 2)
TIMESTEPS = torch.tensor([0, 1, 250, 500, 999])
SIGMA = (TIMESTEPS + 0.5) / 1000


def scheduler(prediction_type: str = "epsilon") -> DDPMScheduler:
    return DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction_type
    )


def path(prediction_type: str) -> DiffusionPath:
    return DiffusionPath(scheduler().alphas_cumprod, prediction_type)


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def test_every_timestep_has_its_own_level_and_the_ends_are_inside() -> None:
    levels = (torch.arange(1000) + 0.5) / 1000
    assert path("epsilon").timestep(levels).tolist() == list(range(1000))
    assert path("epsilon").timestep(torch.tensor([0.0, 1.0])).tolist() == [0, 999]


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_noise_and_target_are_those_of_the_ddpm_scheduler(prediction_type: str) -> None:
    latents, noise = drawn()
    reference, ours = scheduler(prediction_type), path(prediction_type)
    assert torch.equal(ours.add_noise(latents, noise, SIGMA), reference.add_noise(latents, noise, TIMESTEPS))
    target = noise if prediction_type == "epsilon" else reference.get_velocity(latents, noise, TIMESTEPS)
    assert torch.equal(ours.target(latents, noise, SIGMA), target)


@pytest.mark.parametrize(("prediction_type", "extra"), [("epsilon", 0), ("v_prediction", 1)])
def test_min_snr_of_diffusion_is_that_of_the_paper(prediction_type: str, extra: int) -> None:
    snr = compute_snr(scheduler(), TIMESTEPS)
    assert snr.min() < 5 < snr.max()
    torch.testing.assert_close(
        path(prediction_type).min_snr_weight(SIGMA, 5.0), snr.clamp(max=5) / (snr + extra), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(("prediction_type", "weight"), [("epsilon", 1), ("v_prediction", 0)])
def test_min_snr_is_finite_without_any_signal(prediction_type: str, weight: float) -> None:
    without_signal = DiffusionPath(torch.tensor([0.5, 0.0]), prediction_type)
    assert without_signal.min_snr_weight(torch.tensor([0.9]), 5.0).item() == weight


def test_min_snr_counts_the_error_of_the_clean_latents_on_the_straight_path() -> None:
    latents, noise = drawn()
    flow, sigma = FLOW, torch.tensor([0.05, 0.2, 0.4, 0.6, 0.95])
    level = sigma.view(-1, 1, 1, 1)
    noisy, wrong = flow.add_noise(latents, noise, sigma), flow.target(latents, noise, sigma) + 0.3
    clean_error = (noisy - level * wrong - latents).square().flatten(1).mean(1)
    snr = ((1 - sigma) / sigma).square()
    torch.testing.assert_close(
        flow.min_snr_weight(sigma, 5.0) * 0.3**2, snr.clamp(max=5) * clean_error, rtol=1e-3, atol=1e-6
    )


def test_what_depends_on_the_path_is_not_a_weight_of_sigma_only() -> None:
    with pytest.raises(ValueError, match="'min_snr' is not a weight of only sigma"):
        loss_weight(SIGMA, "min_snr")


LEVELS = torch.linspace(0.001, 0.999, 999)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_the_weights_equal_diffusers(weighting: str) -> None:
    assert torch.equal(loss_weight(LEVELS, weighting), compute_loss_weighting_for_sd3(weighting, LEVELS))


def test_the_weight_of_the_smallest_levels_is_bounded() -> None:
    assert loss_weight(torch.tensor([0.0, 1e-8, 1e-3]), "sigma_sqrt").tolist() == pytest.approx([1e6] * 3)


@pytest.mark.parametrize("weighting", ["none", "cosmap", "bell"])
def test_the_weight_averages_to_one_over_uniform_sigma(weighting: str) -> None:
    midpoints = (torch.arange(10_000) + 0.5) / 10_000
    assert loss_weight(midpoints, weighting).mean().item() == pytest.approx(1, abs=1e-5)


def test_the_bell_is_the_table_of_diffsynth_on_an_unshifted_grid() -> None:
    """The published recipe: a Gaussian over 1000 timesteps, minimum taken off, scaled to a mean of one."""
    timesteps = torch.linspace(1000, 0, 1001, dtype=torch.float64)
    gaussian = torch.exp(-2 * ((timesteps - 500) / 1000) ** 2)
    lowered = gaussian - gaussian.min()
    # The trapezoid rule over 1000 intervals, where upstream takes the plain mean of its grid.
    table = lowered * 1000 / lowered.sum()
    torch.testing.assert_close(loss_weight(timesteps / 1000, "bell"), table.float(), rtol=1e-5, atol=1e-5)


def test_the_bell_peaks_in_the_middle_and_ends_at_zero() -> None:
    weight = loss_weight(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), "bell")
    assert weight[0] == weight[4] == 0
    assert weight[1] == weight[3]
    assert weight.argmax() == 2


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap", "bell"])
def test_the_weight_is_float32_in_the_shape_of_sigma(weighting: str) -> None:
    weight = loss_weight(torch.full((2, 3), 0.5, dtype=torch.bfloat16), weighting)
    assert weight.shape == (2, 3)
    assert weight.dtype == torch.float32


def test_an_unknown_weighting_is_refused() -> None:
    with pytest.raises(ValueError, match="'snr'"):
        loss_weight(LEVELS, "snr")
