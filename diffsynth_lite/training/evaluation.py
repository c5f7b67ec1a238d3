"""This file measures the model's loss on fixed items and noise, and says when two such losses compare."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from diffsynth_lite.core.randomness import normal
from diffsynth_lite.data import Bucket, DataIdentity
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.training.objective import DenoisingObjective

_PROTOCOL_SETTINGS = {
    "items": "validation.data and validation.loss_items",
    "seed": "validation.seed",
    "is_average": "validation.use_ema and train.ema_decay",
}


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
    """An item on which the fixed-noise loss is measured.

    Attributes:
        bucket: sizes of the item and of its inputs.
        latents: (...), fp32.
        conditioning: encoded caption and inputs.
        loss_mask: (1, ...) at the size of the latents; None where every pixel counts.
    """

    bucket: Bucket
    latents: torch.Tensor
    conditioning: Conditioning
    loss_mask: torch.Tensor | None = None

    @property
    def form(self) -> tuple[Bucket, torch.Size | None]:
        """What items of one batch have in common."""
        return self.bucket, None if self.loss_mask is None else self.loss_mask.shape


@dataclass(frozen=True, kw_only=True)
class FixedNoiseLoss:
    """The model's error on fixed items, noise and noise levels: a loss without the noise of the draws.

    Item i of n is (i + 0.5) / n of the way from data to noise, so that all of it is covered.

    Attributes:
        name: of the metric.
        items: measured in this order.
        objective: gives each item's error.
        seed: of the noise.
        batch_size: items of one size in one forward.
    """

    name: str
    items: Sequence[ValidationItem]
    objective: DenoisingObjective
    seed: int
    batch_size: int

    def measure(self, transformer: torch.nn.Module) -> dict[str, float]:
        """The mean error by the metric's name; empty without items."""
        if not self.items:
            return {}
        total = 0.0
        with evaluation_mode(transformer):
            for places in self._batches():
                total += self._sum_of_errors(transformer, places)
        return {self.name: total / len(self.items)}

    def _batches(self) -> Iterator[list[int]]:
        """Places of items that follow each other and have one form."""
        for _, group in groupby(range(len(self.items)), key=lambda place: self.items[place].form):
            places = list(group)
            for start in range(0, len(places), self.batch_size):
                yield places[start : start + self.batch_size]

    def _sum_of_errors(self, transformer: torch.nn.Module, places: Sequence[int]) -> float:
        items = [self.items[place] for place in places]
        latents = torch.stack([item.latents for item in items])
        noise = torch.stack(
            [normal(self.seed, "validation-noise", place, latents.shape[1:]) for place in places]
        )
        evenly = self.objective.noise_levels.evenly
        sigma = torch.tensor(
            [evenly((place + 0.5) / len(self.items)) for place in places], device=self.objective.device
        )
        conditioning = [item.conditioning for item in items]
        masks = [item.loss_mask for item in items if item.loss_mask is not None]
        loss_mask = torch.stack(masks) if masks else None
        errors = self.objective.errors(transformer, latents, noise, sigma, conditioning, loss_mask)
        return float(errors.sum())


@dataclass(frozen=True, kw_only=True)
class ValidationProtocol:
    """How the validation loss is measured: two losses compare only where this is the same.

    What may never change in a run is left out.

    Attributes:
        data: the held-out items, as many as ``validation.loss_items`` takes files.
        num_items: how many of them are measured; fewer where a file gives several clips.
        seed: of the noise.
        is_average: whether it is the loss of the averaged weights.
    """

    data: DataIdentity
    num_items: int
    seed: int
    is_average: bool

    def document(self) -> dict[str, Any]:
        """The protocol as a checkpoint keeps it."""
        items = {**asdict(self.data), "num_measured": self.num_items}
        return {"items": items, "seed": self.seed, "is_average": self.is_average}

    def changed_settings(self, saved: Mapping[str, Any] | None) -> list[str]:
        """The settings in which it differs from the document ``saved``; all of them where there is none."""
        given = self.document()
        return [
            name for key, name in _PROTOCOL_SETTINGS.items() if saved is None or saved.get(key) != given[key]
        ]
