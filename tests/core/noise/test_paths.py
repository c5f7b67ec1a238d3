"""The paths from data to noise against diffusers' schedulers."""

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from diffsynth_lite.core.noise import DiffusionPath, FlowMatchingPath, loss_weight

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
    flow, sigma = FlowMatchingPath(), torch.tensor([0.05, 0.2, 0.4, 0.6, 0.95])
    level = sigma.view(-1, 1, 1, 1)
    noisy, wrong = flow.add_noise(latents, noise, sigma), flow.target(latents, noise, sigma) + 0.3
    clean_error = (noisy - level * wrong - latents).square().flatten(1).mean(1)
    snr = ((1 - sigma) / sigma).square()
    torch.testing.assert_close(
        flow.min_snr_weight(sigma, 5.0) * 0.3**2, snr.clamp(max=5) * clean_error, rtol=1e-3, atol=1e-6
    )


def test_what_depends_on_the_path_is_no_weight_of_sigma_alone() -> None:
    with pytest.raises(ValueError, match="'min_snr' is not a weight of only sigma"):
        loss_weight(SIGMA, "min_snr")
