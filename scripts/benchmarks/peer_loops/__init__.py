"""The training loops that ``peers.py`` sets next to the trainer, each in a module that imports what it needs.

All train a LoRA on the mini Qwen-Image. B is the number of samples of a batch.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

LEARNING_RATE, WEIGHT_DECAY = 1e-4, 1e-2


class MicroBatch(Protocol):
    """Samples with their noise.

    Attributes:
        latents: (B, 16, 1, H, W), clean and normalised.
        noise: the shape of ``latents``.
        uniform: (B,), in [0, 1), which become noise levels.
        conditioning: of each sample, with ``prompt_embeds`` (L, D).
    """

    latents: Tensor
    noise: Tensor
    uniform: Tensor
    conditioning: list[dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every loop does.

    Attributes:
        base: folder of the base model.
        layers: names of those with an adapter.
        rank: of the adapter.
        batches: one pass over the data, a batch a step, for the loops that draw noise by themselves.
        checkpointing: whether blocks are recomputed.
        offload: whether their inputs are offloaded, where the loop can.
        device: cpu or cuda.
    """

    base: Path
    layers: Sequence[str]
    rank: int
    batches: Sequence[MicroBatch]
    checkpointing: bool
    offload: bool
    device: str = "cpu"


class Loop(Protocol):
    """A training loop that takes turns with others.

    Attributes:
        model: with its adapter, named as peft does.
    """

    model: nn.Module

    def steps(self) -> Generator[None, None, None]:
        """Each ``next`` takes an optimizer step."""

    def loss(self, batch: MicroBatch, sigma: Tensor) -> Tensor:
        """What the steps minimise, a scalar, of a batch at noise levels (B,)."""


def noise_levels(batch: MicroBatch) -> Tensor:
    """(B,) levels of a batch: the quickstart's density, logit-normal with mean 0.3 and deviation 1.2."""
    return torch.sigmoid(torch.special.ndtri(batch.uniform) * 1.2 + 0.3)


def padded(batch: MicroBatch) -> tuple[Tensor, Tensor | None]:
    """The prompts of a batch (B, L, D), and the mask of their tokens (B, L); None where none is padded."""
    prompts = [sample["prompt_embeds"] for sample in batch.conditioning]
    embeds = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = torch.arange(embeds.shape[1])[None] < lengths[:, None]
    return embeds, None if mask.all() else mask
