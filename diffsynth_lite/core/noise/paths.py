"""The ways from data to noise, what a model learns to predict on each, and how much each noise level counts.

Sources: flow matching: Lipman et al., "Flow Matching for Generative Modeling" (arXiv 2210.02747), Liu et al.,
"Flow Straight and Fast" (arXiv 2209.03003); denoising diffusion: Ho et al., "Denoising Diffusion
Probabilistic Models" (arXiv 2006.11239), v prediction: Salimans and Ho (arXiv 2202.00512), min-SNR: Hang et
al. (arXiv 2303.09556), in the forms of ``diffusers.DDPMScheduler``.

Time runs as in diffusers: sigma 0 is data, sigma 1 is noise. Shapes: B samples, each of any shape. Everything
is float32, whatever the model runs in: a sigma in bfloat16 has three digits.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

LossWeighting = Literal["none", "sigma_sqrt", "cosmap", "bell", "min_snr"]
"""``min_snr`` depends on the path from data to noise: see :class:`NoisePath`."""

_BELL_FLOOR = math.exp(-0.5)
"""Height of ``exp(-2 * (sigma - 0.5)**2)`` at sigma 0 and 1, taken off so that the bell ends at 0."""

_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - _BELL_FLOOR
"""Integral over sigma in [0, 1] of the bell before normalising."""

_SMALLEST_GRID_SIGMA = 1e-3
"""Lowest level of the 1000 timesteps that ``sigma**-2`` was made for; below it, it has no bound."""


def loss_weight(sigma: Tensor, weighting: LossWeighting) -> Tensor:
    """Factor for the loss of a sample at noise level ``sigma``.

    ``none`` is 1; ``sigma_sqrt`` is ``sigma**-2``, 1e6 at the most, and ``cosmap`` is
    ``2 / (pi * (1 - 2 sigma + 2 sigma**2))``, both as ``compute_loss_weighting_for_sd3`` of
    ``diffusers.training_utils`` (arXiv 2403.03206, section 3.1).
    ``bell`` is ``exp(-2 * (sigma - 0.5)**2)``, lowered to 0 at both ends and scaled to a mean of 1 over
    uniform sigma: the flow-matching weight of DiffSynth-Studio (``FlowMatchScheduler.set_training_weight``)
    in closed form, where upstream normalises over its own shifted grid.

    Args:
        sigma: any shape, in (0, 1).

    Returns:
        The shape of ``sigma``, float32, not negative.
    """
    sigma = sigma.float()
    if weighting == "none":
        return torch.ones_like(sigma)
    if weighting == "sigma_sqrt":
        return sigma.clamp(min=_SMALLEST_GRID_SIGMA) ** -2.0
    if weighting == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma + 2 * sigma**2))
    if weighting == "bell":
        bump = torch.exp(-2 * (sigma - 0.5) ** 2) - _BELL_FLOOR
        return bump.clamp(min=0) / _BELL_MEAN
    raise ValueError(f"{weighting!r} is not a weight of only sigma; known: none, sigma_sqrt, cosmap, bell")


PredictionType = Literal["epsilon", "v_prediction"]


class NoisePath(ABC):
    """A way from data (noise level 0) to noise (noise level 1)."""

    loss_weightings: ClassVar[tuple[LossWeighting, ...]]
    noise_level: ClassVar[str] = "from 0, data, to 1, noise"

    @abstractmethod
    def add_noise(self, latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Latents at a noise level.

        Args:
            latents: (B, ...), clean, normalised latents.
            noise: the shape of ``latents``, standard normal.
            sigma: (B,), noise level of each sample, in [0, 1].

        Returns:
            The shape of ``latents``, float32.
        """

    @abstractmethod
    def target(self, latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """What to predict from ``add_noise(latents, noise, sigma)``; arguments and shape as there."""

    @abstractmethod
    def min_snr_weight(self, sigma: Tensor, gamma: float) -> Tensor:
        """Factor of the squared error that makes it the error of the clean latents times ``min(SNR, gamma)``.

        Args:
            sigma: (B,), in (0, 1).
            gamma: where the ratio of signal to noise is cut off, above 0.

        Returns:
            (B,), float32.
        """


class FlowMatchingPath(NoisePath):
    """The straight path; its target is the velocity ``noise - latents``."""

    loss_weightings = ("none", "sigma_sqrt", "cosmap", "bell", "min_snr")
    noise_level = "the part of noise in what the model sees"

    def add_noise(self, latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """``(1 - sigma) * latents + sigma * noise``."""
        _check_same_shape(latents, noise)
        if sigma.shape != latents.shape[:1]:
            raise ValueError(
                f"sigma has shape {tuple(sigma.shape)}; latents {tuple(latents.shape)} need one a sample"
            )
        level = sigma.float().reshape(-1, *[1] * (latents.ndim - 1))
        return (1 - level) * latents.float() + level * noise.float()

    def target(self, latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        _check_same_shape(latents, noise)
        return noise.float() - latents.float()

    def min_snr_weight(self, sigma: Tensor, gamma: float) -> Tensor:
        sigma = sigma.float()
        # x0 = x_t - sigma * velocity, so the two errors are sigma apart; SNR is ((1 - sigma) / sigma)**2.
        return torch.minimum((1 - sigma).square(), gamma * sigma.square())


class DiffusionPath(NoisePath):
    """The path of denoising diffusion, in whole timesteps: level (t + 0.5) / T is timestep t of T.

    Args:
        alphas_cumprod: (T,), the share of the signal's variance that is left at each timestep.
        prediction_type: the model predicts the noise (``epsilon``) or the velocity (``v_prediction``).
    """

    loss_weightings = ("none", "min_snr")
    noise_level = "the part of all timesteps that lie below"

    def __init__(self, alphas_cumprod: Tensor, prediction_type: PredictionType) -> None:
        self._alphas_cumprod = alphas_cumprod.float().cpu()
        self._prediction_type = prediction_type

    def timestep(self, sigma: Tensor) -> Tensor:
        """(B,) timesteps, int64, of (B,) noise levels."""
        num_timesteps = len(self._alphas_cumprod)
        return (sigma.float() * num_timesteps).long().clamp(max=num_timesteps - 1)

    def add_noise(self, latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        signal = self._signal_variance(sigma, latents.ndim)
        return signal.sqrt() * latents.float() + (1 - signal).sqrt() * noise.float()

    def target(self, latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        if self._prediction_type == "epsilon":
            return noise.float()
        signal = self._signal_variance(sigma, latents.ndim)
        return signal.sqrt() * noise.float() - (1 - signal).sqrt() * latents.float()

    def min_snr_weight(self, sigma: Tensor, gamma: float) -> Tensor:
        signal = self._signal_variance(sigma, 1)
        # From the SNR, signal / (1 - signal): min(SNR, gamma) / SNR for epsilon, / (SNR + 1) for v.
        if self._prediction_type == "epsilon":
            return (gamma * (1 - signal) / signal).clamp(max=1)  # 1 also where no signal is left
        return torch.minimum(signal, gamma * (1 - signal))

    def _signal_variance(self, sigma: Tensor, ndim: int) -> Tensor:
        """(B, 1, ...) with ``ndim`` axes, on the device of ``sigma``."""
        table = self._alphas_cumprod.to(sigma.device)
        return table[self.timestep(sigma)].reshape(-1, *[1] * (ndim - 1))


def _check_same_shape(latents: Tensor, noise: Tensor) -> None:
    if noise.shape != latents.shape:
        raise ValueError(
            f"noise has shape {tuple(noise.shape)}, latents {tuple(latents.shape)}; they must agree"
        )
