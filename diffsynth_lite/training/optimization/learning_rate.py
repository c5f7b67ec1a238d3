"""The learning rate as a function of the step: nothing to save, nothing to restore.

The shapes are those of ``diffusers.optimization``. A stateful scheduler would count its own steps, which on
resume ignores a changed setting (torch's cosine) or jumps (diffusers' lambdas over a new total).
"""

from collections.abc import Callable
from typing import Literal

import torch
from diffusers.optimization import get_scheduler

from diffsynth_lite.errors import UserError

LearningRateScheduler = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


def learning_rate_schedule(
    name: LearningRateScheduler,
    *,
    base: float,
    warmup_steps: int,
    total_steps: int,
    setting: str = "train.learning_rate",
) -> Callable[[int], float]:
    """Learning rate of each optimizer step, counted from 0.

    The first step of a warm-up takes ``base / warmup_steps``, its last one ``base``. From ``total_steps`` on
    the rate stays at that of the last step.

    Args:
        name: shape after the warm-up; ``cosine_with_restarts`` has one cycle, ``polynomial`` has power 1.
        base: learning rate at the end of the warm-up.
        warmup_steps: optimizer steps of linear warm-up, 0 for none.
        total_steps: optimizer steps of the whole run, warm-up included.
        setting: that gives ``base``, for messages.

    Raises:
        UserError: the warm-up leaves no step, or ``base`` is below what the shape decays to.
    """
    if not 0 <= warmup_steps < total_steps:
        raise UserError(f"train.warmup_steps {warmup_steps} must be less than train.steps {total_steps}")
    try:
        factor = _diffusers_factor(name, base=base, warmup_steps=warmup_steps, total_steps=total_steps)
    except ValueError as error:
        raise UserError(f"{setting} {base:g} with train.lr_scheduler {name}: {error}") from error

    def learning_rate(step: int) -> float:
        if step < warmup_steps:
            return base * factor(step + 1)
        return base * factor(min(step, total_steps - 1))

    return learning_rate


def _diffusers_factor(
    name: str, *, base: float, warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """diffusers' factor of the base learning rate; taken from a scheduler that is never stepped."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=base)
    scheduler = get_scheduler(
        "constant_with_warmup" if name == "constant" else name,
        optimizer,
        num_warmup_steps=warmup_steps,
        num_training_steps=total_steps,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor
