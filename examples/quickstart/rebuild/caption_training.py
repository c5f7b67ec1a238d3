"""The loop in which both transformers learn what captions mean, and its draws."""

from collections.abc import Callable

import torch
from diffusers.training_utils import EMAModel
from schedule import Progress, learning_rate

PEAK_LEARNING_RATE = 2e-3
NUM_WARMUP_STEPS = 100
CAPTION_DROPOUT = 0.1

BatchLoss = Callable[[torch.Tensor, torch.Tensor, torch.Generator], torch.Tensor]


def train_on_captions(
    transformer: torch.nn.Module,
    loss_of: BatchLoss,
    caption_of: torch.Tensor,
    *,
    num_steps: int,
    batch_size: int,
    seed: int,
) -> None:
    """Train in place and leave the moving average of the weights in the transformer.

    Args:
        transformer: the model.
        loss_of: the loss of a batch, from the indices of its items, those of their captions, and a generator
            of noise.
        caption_of: (N,), the index of each item's caption; caption 0 is the empty one, which now and then
            takes the place of another.
        num_steps: optimizer steps.
        batch_size: items a step.
        seed: of the order and of the noise.
    """
    transformer.train()
    optimizer = torch.optim.AdamW(
        transformer.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01
    )
    average = EMAModel(transformer.parameters(), decay=0.999)
    generator = torch.Generator().manual_seed(seed)
    progress = Progress("transformer", num_steps)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(PEAK_LEARNING_RATE, step, num_steps, NUM_WARMUP_STEPS)
        chosen = torch.randint(len(caption_of), (batch_size,), generator=generator)
        kept = torch.rand(batch_size, generator=generator) >= CAPTION_DROPOUT
        loss = loss_of(chosen, caption_of[chosen] * kept, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(transformer.parameters())
        progress.step(loss.item())
    average.copy_to(transformer.parameters())
    transformer.eval()
