"""This file adds up the losses of a step by kind: what is learned and preserved, pictures and sound."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_KINDS = ("learned", "preserved", "video", "audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanLosses:
    """Mean losses of a step, each over the samples of a kind; None where the step has none of it.

    Attributes:
        learned: of samples that are learned.
        preserved: of samples that are preserved.
        video: of the pictures of samples that are learned, where sound is learned beside them.
        audio: of the sound of samples that are learned and have some.
    """

    learned: float | None
    preserved: float | None = None
    video: float | None = None
    audio: float | None = None


class LossesApart:
    """Sum of the losses of a step, and number of the samples, of each kind in :class:`MeanLosses`.

    Sums stay on the device: to add some waits for nothing.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = dict.fromkeys(_KINDS, 0.0)
        self._numbers = dict.fromkeys(_KINDS, 0.0)

    def add(self, losses: Tensor, preserved: Sequence[int]) -> None:
        """Count samples.

        Args:
            losses: (B,), fp32.
            preserved: places of those that are.
        """
        for place, loss in enumerate(losses.detach().unbind()):
            self._add("preserved" if place in preserved else "learned", loss, 1.0)

    def add_parts(
        self, video: Tensor, audio: Tensor, has_audio: Sequence[float], preserved: Sequence[int]
    ) -> None:
        """Count the parts of the losses of samples, beside :meth:`add`.

        Args:
            video: (B,), fp32.
            audio: (B,), fp32, 0 where it does not count.
            has_audio: of each sample 1 where its sound counts, else 0.
            preserved: places of those that are; they are left out.
        """
        for place, number in enumerate(has_audio):
            if place not in preserved:
                self._add("video", video[place].detach(), 1.0)
                self._add("audio", audio[place].detach(), number)

    def take(self, device: torch.device) -> Tensor:
        """(8,), fp32: the sums, and then the numbers, since this was last called, on the device."""
        sums = [torch.as_tensor(value, device=device) for value in self._sums.values()]
        totals = torch.stack([*sums, *torch.tensor(list(self._numbers.values())).to(device)])
        self._sums, self._numbers = dict.fromkeys(_KINDS, 0.0), dict.fromkeys(_KINDS, 0.0)
        return totals

    def _add(self, kind: str, loss: Tensor, number: float) -> None:
        self._sums[kind] = self._sums[kind] + loss
        self._numbers[kind] += number


def mean_losses(loss: float, apart: Sequence[float]) -> MeanLosses:
    """The mean losses of the samples of a step.

    Args:
        loss: of the step.
        apart: what :meth:`LossesApart.take` gave; empty where all samples are learned, count alike, and have
            no sound.
    """
    if not apart:
        return MeanLosses(learned=loss)
    sums, numbers = apart[: len(_KINDS)], apart[len(_KINDS) :]
    means = map(_mean, sums, numbers)
    return MeanLosses(**dict(zip(_KINDS, means, strict=True)))


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None
