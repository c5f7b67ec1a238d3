"""This file holds the objective of a slider: each end imitates the base model under another prompt.

At strength 1 the prediction for the neutral prompt is to be the base's for the positive one, at -1 that for
the negative one. Prompts that anchor the slider are to give what the base gives, at both strengths.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.gradient.checkpoint import current_engine
from diffsynth_lite.data.batches import Batch, SliderBatch
from diffsynth_lite.lora import at_strength, scalings_reader, without_adapter
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.training.objective import DenoisingObjective, pixel_errors

STRENGTHS = (1.0, -1.0)
"""Strengths that are trained; one after the other, so that one backward pass ends before the next begins."""
SHOWN_STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)
"""Those of previews: beyond what is trained, to see whether it holds there."""


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """The model's inputs for B samples and then A anchors.

    Attributes:
        noisy: (B + A, ...), fp32.
        sigma: (B + A,), noise levels.
    """

    noisy: torch.Tensor
    sigma: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class SliderObjective(DenoisingObjective):
    """The error of both ends of a slider.

    Attributes:
        target: see ``objective.slider.target``, as for the next two.
    """

    target: Literal["ends", "difference"] = "ends"
    eta: float = 1.0
    anchor_weight: float = 1.0

    def losses(self, transformer: torch.nn.Module, batch: Batch) -> Iterator[torch.Tensor]:
        """Half of the loss for each strength, which is set until the next one is asked for.

        The mean error of the samples plus the weight times that of the anchors. An anchor stands for two
        samples, as one of two positions has one: in the mean over all micro-batches of a step each counts
        the same, however it is split.
        """
        prompts = batch.slider
        assert prompts is not None, "the batches of a slider have its prompts"
        num_samples = len(batch.positions)
        current_engine().state = scalings_reader(transformer)
        inputs = self._inputs(batch, prompts)
        targets = self._targets(transformer, inputs, batch.conditioning, prompts)
        weight = self._weight(inputs.sigma)
        for strength, target in zip(STRENGTHS, targets, strict=True):
            with at_strength(transformer, strength):
                estimate = self._predict(transformer, inputs, [*batch.conditioning, *prompts.kept]).float()
                errors = weight * pixel_errors(estimate, target, self.huber_delta).flatten(1).mean(1)
                samples, kept = errors[:num_samples], errors[num_samples:]
                if self.is_counted:
                    self._count_side(batch, strength, inputs.sigma[:num_samples], samples, kept)
                anchored = self.anchor_weight * 2 * kept.sum() / num_samples
                yield (samples.mean() + anchored) / len(STRENGTHS)

    def _inputs(self, batch: Batch, prompts: SliderBatch) -> _Inputs:
        shape, path = batch.latents.shape[1:], self.family.noise_path
        uniform = torch.cat([batch.uniform, prompts.uniform])
        sigma = self.noise_levels.sigma(uniform, shape, step_uniform=batch.step_uniform).to(self.device)
        latents, noise = (
            torch.cat([own.float(), kept.float()]).to(self.device)
            for own, kept in ((batch.latents, prompts.latents), (batch.noise, prompts.noise))
        )
        return _Inputs(noisy=path.add_noise(latents, noise, sigma), sigma=sigma)

    @torch.no_grad()
    def _targets(
        self,
        transformer: torch.nn.Module,
        inputs: _Inputs,
        neutral: Sequence[Conditioning],
        prompts: SliderBatch,
    ) -> list[torch.Tensor]:
        """The target of each strength, (B + A, ...) in fp32: what the base gives, ahead of both sides."""
        num_samples = len(neutral)
        of_samples = _Inputs(noisy=inputs.noisy[:num_samples], sigma=inputs.sigma[:num_samples])

        def base(given: Sequence[Conditioning]) -> torch.Tensor:
            return self._predict(transformer, of_samples, given).float()

        with without_adapter(transformer), evaluation_mode(transformer):
            # In one pass: the anchors have the same target at both ends.
            joint = self._predict(transformer, inputs, [*prompts.positive, *prompts.kept]).float()
            positive, kept = joint[:num_samples], joint[num_samples:]
            negative = base(prompts.negative)
            if self.target == "difference":
                own, step = base(neutral), self.eta * (positive - negative)
                ends = [own + step, own - step]
            elif self.eta == 1:
                ends = [positive, negative]
            else:
                own = base(neutral)
                ends = [own + self.eta * (end - own) for end in (positive, negative)]
        return [torch.cat([end, kept]) for end in ends]

    def _predict(
        self, transformer: torch.nn.Module, inputs: _Inputs, conditioning: Sequence[Conditioning]
    ) -> torch.Tensor:
        return self.family.predict(transformer, inputs.noisy, inputs.sigma, conditioning)

    def _count_side(
        self, batch: Batch, strength: float, sigma: torch.Tensor, samples: torch.Tensor, kept: torch.Tensor
    ) -> None:
        assert self.losses_by_kind is not None
        self.losses_by_kind.add_to("positive" if strength > 0 else "negative", samples)
        self.losses_by_kind.add_to("preserved", kept)
        self._count(batch, samples, sigma, samples)
