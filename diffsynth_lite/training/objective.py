"""This file turns a batch into a loss: flow matching on a model family's velocity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from diffsynth_lite.core.noise import (
    LossWeighting,
    TimestepDensity,
    add_noise,
    loss_weight,
    shift_sigma,
    sigma_from_uniform,
    velocity,
)
from diffsynth_lite.data import Batch
from diffsynth_lite.pipelines import Conditioning, ModelFamily


@dataclass(frozen=True, kw_only=True)
class NoiseLevels:
    """The distribution of noise levels that the model is trained on.

    Attributes:
        density: name of the density before the shift: uniform, logit_normal, mode or cosmap.
        logit_mean: of the logit-normal density.
        logit_std: of the logit-normal density.
        mode_scale: of the mode density.
        shift: of one sample's latents' shape; see :func:`diffsynth_lite.core.noise.shift_sigma`.
        sigma_min: lower end of the range trained on, in [0, 1).
        sigma_max: upper end, in (0, 1].
    """

    density: TimestepDensity
    logit_mean: float
    logit_std: float
    mode_scale: float
    shift: Callable[[Sequence[int]], float]
    sigma_min: float
    sigma_max: float

    def sigma(self, uniform: torch.Tensor, latents_shape: Sequence[int]) -> torch.Tensor:
        """Noise levels of uniform draws.

        Args:
            uniform: (B,), in [0, 1).
            latents_shape: shape of one sample's latents.

        Returns:
            (B,), in [sigma_min, sigma_max], fp32.
        """
        sigma = sigma_from_uniform(
            uniform,
            self.density,
            logit_mean=self.logit_mean,
            logit_std=self.logit_std,
            mode_scale=self.mode_scale,
        )
        sigma = shift_sigma(sigma, self.shift(latents_shape))
        return self.sigma_min + (self.sigma_max - self.sigma_min) * sigma


@dataclass(frozen=True, kw_only=True)
class FlowMatching:
    """The flow-matching objective on one model family.

    Attributes:
        family: gives the velocity.
        noise_levels: where on the path from data to noise the model is trained.
        weighting: loss weight by noise level; see :func:`diffsynth_lite.core.noise.loss_weight`.
        device: of the transformer.
        use_gradient_checkpointing: recompute each block in backward.
        use_gradient_checkpointing_offload: also park each block's inputs in host memory.
    """

    family: ModelFamily
    noise_levels: NoiseLevels
    weighting: LossWeighting
    device: torch.device
    use_gradient_checkpointing: bool
    use_gradient_checkpointing_offload: bool

    def loss(self, transformer: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Mean weighted squared error of the velocity over a micro-batch, a scalar in fp32."""
        sigma = self.noise_levels.sigma(batch.uniform, batch.latents.shape[1:]).to(self.device)
        errors = self.velocity_errors(
            transformer, batch.latents, batch.noise, sigma, batch.conditioning, batch.loss_mask
        )
        return (loss_weight(sigma, self.weighting) * errors).mean()

    def velocity_errors(
        self,
        transformer: torch.nn.Module,
        latents: torch.Tensor,
        noise: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Mean squared error of each sample's velocity.

        Args:
            transformer: plain or wrapped by DDP.
            latents: (B, ...), fp32.
            noise: (B, ...), standard normal, fp32.
            sigma: (B,), in [0, 1], fp32, on the device.
            conditioning: of the B samples.
            loss_mask: (B, 1, ...), in [0, 1], not all zero in any sample: weights of the squared errors. They
                are divided by their mean over the sample, so that a small mask does not make a small loss.

        Returns:
            (B,), fp32.
        """
        # Everything but the model's input stays in fp32: bf16 has 8 bits for a noise level.
        latents, noise = latents.to(self.device), noise.to(self.device)
        predicted = self.family.predict_velocity(
            transformer,
            add_noise(latents, noise, sigma),
            sigma,
            conditioning,
            use_gradient_checkpointing=self.use_gradient_checkpointing,
            use_gradient_checkpointing_offload=self.use_gradient_checkpointing_offload,
        )
        squared = (predicted.float() - velocity(latents, noise)).square()
        if loss_mask is None:
            return squared.flatten(1).mean(1)
        mask = loss_mask.to(self.device).float()
        return (squared * mask).flatten(1).mean(1) / mask.flatten(1).mean(1)
