"""This file keeps the losses of single samples with their noise levels, until somebody takes them."""

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


@dataclass(kw_only=True)
class SampleLosses:
    """The noise levels and losses of samples; on the device until they are taken.

    Attributes:
        seed: of the run.
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
            names: of the B items.
            positions: number of each sample in the run.
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
