"""This file adds up the losses of a step, those of what is learned apart from those of what is preserved."""

from collections.abc import Sequence

import torch
from torch import Tensor


class LossesApart:
    """Sum of the losses, and number, of the samples of a step that are learned, and of those preserved.

    Sums stay on the device: to add some waits for nothing.
    """

    def __init__(self) -> None:
        self._sums: list[Tensor | float] = [0.0, 0.0]
        self._numbers = [0.0, 0.0]

    def add(self, losses: Tensor, preserved: Sequence[int]) -> None:
        """Count samples.

        Args:
            losses: (B,), fp32.
            preserved: places of those that are.
        """
        for place, loss in enumerate(losses.detach().unbind()):
            kind = place in preserved
            self._sums[kind] = self._sums[kind] + loss
            self._numbers[kind] += 1

    def take(self, device: torch.device) -> Tensor:
        """(4,), fp32: both sums, and both numbers, since this was last called, on the device."""
        sums = [torch.as_tensor(value, device=device) for value in self._sums]
        totals = torch.stack([*sums, *torch.tensor(self._numbers).to(device)])
        self._sums, self._numbers = [0.0, 0.0], [0.0, 0.0]
        return totals


def mean_losses(loss: float, apart: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean loss of the samples of a step that are learned, and of those that are preserved.

    Args:
        loss: of the step.
        apart: what :meth:`LossesApart.take` gave; empty where all samples are learned, and count alike.

    Returns:
        None for a kind that the step has none of.
    """
    if not apart:
        return loss, None
    learned, preserved, num_learned, num_preserved = apart
    return _mean(learned, num_learned), _mean(preserved, num_preserved)


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None
