"""This file makes the optimizer of a run, and what is kept of the weights that it has changed."""

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.training.ema import AveragedWeights


def build_optimizer(config: Config, transformer: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW over the adapter's parameters; the learning rate is set before each step.

    Fused: torch's default on the CPU took 7 times as long, 4.8 ms a step for 144 small tensors.
    """
    return torch.optim.AdamW(
        [parameter for parameter in transformer.parameters() if parameter.requires_grad],
        lr=config.train.learning_rate,
        betas=(config.train.adam_beta1, config.train.adam_beta2),
        eps=config.train.adam_epsilon,
        weight_decay=config.train.weight_decay,
        fused=True,
    )


def build_average(config: Config, transformer: torch.nn.Module) -> AveragedWeights | None:
    """The moving average of the adapter, which starts at its present values; None where it is not wanted."""
    decay = config.train.ema_decay
    return None if decay is None else AveragedWeights(transformer, decay=decay)
