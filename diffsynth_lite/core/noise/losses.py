"""This file adds up the losses of samples: by kind, by tenth of the noise levels, and one by one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch
from torch import Tensor

from diffsynth_lite.core.randomness import uniform

_MOST_KEPT = 200_000
"""Samples of a run: some 10 MB in a file."""
_MOST_WAITING = 10_000
"""Samples until they are taken."""
_ADDED_AT_ONCE = 64
"""Calls whose losses wait for each other: one by one, a dozen kernels were launched for a few numbers."""
_NUM_TENTHS = 10


class LossByTenth:
    """Sum of the losses, and number, of the samples in each tenth of the noise levels.

    Both stay on the device: to add some waits for nothing.
    """

    def __init__(self) -> None:
        self._totals: Tensor | None = None
        self._levels: list[Tensor] = []
        self._losses: list[Tensor] = []

    def add(self, sigma: Tensor, losses: Tensor) -> None:
        """Count samples; one whose loss is not finite is left out.

        Args:
            sigma: (B,), noise levels in [0, 1]; 1 itself belongs to the last tenth.
            losses: (B,), on the same device.
        """
        self._levels.append(sigma)
        self._losses.append(losses.detach())
        if len(self._losses) == _ADDED_AT_ONCE:
            self._add_up()

    def take(self, device: torch.device) -> Tensor:
        """(2, 10), fp32: the sums and the numbers since this was last called, on the device."""
        if self._losses:
            self._add_up()
        totals, self._totals = self._totals, None
        return torch.zeros(2, _NUM_TENTHS, device=device) if totals is None else totals

    def _add_up(self) -> None:
        sigma, losses = torch.cat(self._levels), torch.cat(self._losses).float()
        self._levels, self._losses = [], []
        tenths = torch.arange(_NUM_TENTHS, device=sigma.device)[:, None]
        counts = ((sigma * _NUM_TENTHS).long().clamp(max=_NUM_TENTHS - 1) == tenths) & losses.isfinite()
        totals = torch.stack([torch.where(counts, losses, 0.0).sum(1), counts.sum(1)])
        self._totals = totals if self._totals is None else self._totals + totals


@dataclass(kw_only=True)
class SampleLosses:
    """The noise levels and losses of samples; on the device until they are taken.

    Attributes:
        share: part of the samples that is kept, in [0, 1]. Which these are is decided by their positions, so
            that it is the same after a resume, and on any number of processes.
    """

    seed: int = 0
    share: float = 1.0
    _names: list[str] = field(init=False, default_factory=list)
    _positions: list[int] = field(init=False, default_factory=list)
    _values: list[Tensor] = field(init=False, default_factory=list)

    @classmethod
    def of_run(cls, *, seed: int, num_samples: int) -> "SampleLosses":
        """Those of a run of so many samples, of which no more are kept than a small file holds."""
        return cls(seed=seed, share=min(1.0, _MOST_KEPT / num_samples))

    def add(self, names: Sequence[str], positions: Sequence[int], sigma: Tensor, losses: Tensor) -> None:
        """Keep the samples of a micro-batch; waits for nothing.

        Args:
            sigma: (B,), noise levels, fp32.
            losses: (B,), fp32, on the same device.
        """
        if len(self._names) < _MOST_WAITING:
            self._names += names
            self._positions += positions
            self._values += sigma, losses.detach()

    def take(self) -> list[tuple[str, float, float]]:
        """Name of the item, noise level and loss of each sample that is kept, since this was last called."""
        if not self._names:
            return []
        sigma = torch.cat(self._values[::2]).tolist()
        losses = torch.cat(self._values[1::2]).tolist()
        samples = zip(self._names, sigma, losses, strict=True)
        kept = map(self._is_kept, self._positions)
        self._names, self._positions, self._values = [], [], []
        return list(compress(samples, kept))

    def _is_kept(self, position: int) -> bool:
        return self.share == 1 or uniform(self.seed, "kept-loss", position) < self.share


_KINDS = ("learned", "preserved", "video", "audio", "positive", "negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeanLosses:
    """Mean losses of a step, each over the samples of a kind; None where the step has none of it.

    Attributes:
        video: of the frames of samples that are learned, where audio is learned, too.
        positive: of samples at strength 1 of a slider, as ``negative`` at -1.
    """

    learned: float | None
    preserved: float | None = None
    video: float | None = None
    audio: float | None = None
    positive: float | None = None
    negative: float | None = None


class LossBreakdown:
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
        """
        for place, loss in enumerate(losses.detach().unbind()):
            self._add("preserved" if place in preserved else "learned", loss, 1.0)

    def add_parts(
        self, video: Tensor, audio: Tensor, has_audio: Sequence[float], preserved: Sequence[int]
    ) -> None:
        """Count the parts of the losses of samples, in addition to :meth:`add`.

        Args:
            video: (B,), fp32.
            audio: (B,), fp32, 0 where it does not count.
            has_audio: of each sample 1 where its audio counts, else 0.
        """
        for place, number in enumerate(has_audio):
            if place not in preserved:
                self._add("video", video[place].detach(), 1.0)
                self._add("audio", audio[place].detach(), number)

    def add_to(self, kind: str, losses: Tensor) -> None:
        """Count samples of a kind, in addition to :meth:`add`.

        Args:
            losses: (B,), fp32.
        """
        for loss in losses.detach().unbind():
            self._add(kind, loss, 1.0)

    def take(self, device: torch.device) -> Tensor:
        """(12,), fp32: the sums, and then the numbers, since this was last called, on the device."""
        sums = [torch.as_tensor(value, device=device) for value in self._sums.values()]
        totals = torch.stack([*sums, *torch.tensor(list(self._numbers.values())).to(device)])
        self._sums, self._numbers = dict.fromkeys(_KINDS, 0.0), dict.fromkeys(_KINDS, 0.0)
        return totals

    def _add(self, kind: str, loss: Tensor, number: float) -> None:
        self._sums[kind] = self._sums[kind] + loss
        self._numbers[kind] += number


def mean_losses(loss: float, totals: Sequence[float]) -> MeanLosses:
    """The mean losses of the samples of a step.

    Args:
        totals: what :meth:`LossBreakdown.take` gave; empty where all samples are learned, count alike, and
            have no audio.
    """
    if not totals:
        return MeanLosses(learned=loss)
    kinds = zip(_KINDS, totals[: len(_KINDS)], totals[len(_KINDS) :], strict=True)
    return MeanLosses(**{kind: total / number if number else None for kind, total, number in kinds})
