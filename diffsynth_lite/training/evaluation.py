"""This file measures the model between steps, and leaves it as it found it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from diffsynth_lite.core.randomness import normal
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.training.objective import FlowMatching


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; training mode is restored afterwards, also after an error."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


@dataclass(frozen=True, kw_only=True)
class ValidationItem:
    """One item of the fixed-noise loss: latents (...) in fp32, and what they are conditioned on."""

    latents: torch.Tensor
    conditioning: Conditioning


@dataclass(frozen=True, kw_only=True)
class FixedNoiseLoss:
    """The velocity's error on fixed items, noise and noise levels: a loss without the noise of the draws.

    Item i of n has the noise level (i + 0.5) / n, so that the whole path from data to noise is covered.

    Attributes:
        name: of the metric.
        items: measured in this order.
        objective: gives each item's error.
        seed: of the noise.
        batch_size: items in one forward.
    """

    name: str
    items: Sequence[ValidationItem]
    objective: FlowMatching
    seed: int
    batch_size: int

    def measure(self, transformer: torch.nn.Module) -> dict[str, float]:
        """The mean error by the metric's name; empty without items."""
        if not self.items:
            return {}
        total = 0.0
        with evaluation_mode(transformer):
            for start in range(0, len(self.items), self.batch_size):
                total += self._sum_of_errors(
                    transformer, range(start, min(start + self.batch_size, len(self.items)))
                )
        return {self.name: total / len(self.items)}

    def _sum_of_errors(self, transformer: torch.nn.Module, places: Sequence[int]) -> float:
        items = [self.items[place] for place in places]
        latents = torch.stack([item.latents for item in items])
        noise = torch.stack(
            [normal(self.seed, "validation-noise", place, latents.shape[1:]) for place in places]
        )
        sigma = torch.tensor(
            [(place + 0.5) / len(self.items) for place in places], device=self.objective.device
        )
        conditioning = [item.conditioning for item in items]
        errors = self.objective.velocity_errors(transformer, latents, noise, sigma, conditioning)
        return float(errors.sum())
