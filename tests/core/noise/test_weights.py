"""Loss weights against diffusers and their closed forms."""

import pytest
import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3

from diffsynth_lite.core.noise import loss_weight

SIGMA = torch.linspace(0.001, 0.999, 999)


@pytest.mark.parametrize("weighting", ["none", "sigma_sqrt", "cosmap"])
def test_the_weights_equal_diffusers(weighting: str) -> None:
    assert torch.equal(loss_weight(SIGMA, weighting), compute_loss_weighting_for_sd3(weighting, SIGMA))


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
        loss_weight(SIGMA, "snr")
