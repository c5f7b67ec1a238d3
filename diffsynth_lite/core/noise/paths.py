"""The ways from data to noise that models are trained on, and what a model learns to predict on each.

Sources: flow matching as in :mod:`diffsynth_lite.core.noise.flow_matching`; denoising diffusion: Ho et al.,
"Denoising Diffusion Probabilistic Models" (arXiv 2006.11239), v prediction: Salimans and Ho (arXiv
2202.00512), min-SNR: Hang et al. (arXiv 2303.09556), in the forms of ``diffusers.DDPMScheduler``.
Shapes: B samples, each of any shape. Everything is float32.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from diffsynth_lite.core.noise.flow_matching import add_noise, velocity
from diffsynth_lite.core.noise.weights import LossWeighting

PredictionType = Literal["epsilon", "v_prediction"]


class NoisePath(ABC):
    """A way from data (noise level 0) to noise (noise level 1).

    Attributes:
        loss_weightings: weightings that are defined on it.
        noise_level: what a noise level is on it, in words.
    """

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
        return add_noise(latents, noise, sigma)

    def target(self, latents: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        return velocity(latents, noise)

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
