"""This file says what a loss on held-out data is measured by: losses compare only where that is the same."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diffsynth_lite.data import DataIdentity

_SETTINGS = {
    "items": "validation.data and validation.loss_items",
    "seed": "validation.seed",
    "is_average": "validation.use_ema and train.ema_decay",
}


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What decides the loss on fixed noise besides the weights and what may never change in a run.

    Attributes:
        data: what the held-out items are, as many as ``validation.loss_items`` takes files.
        num_items: how many of them are measured; fewer where a file gives several clips.
        seed: of the noise.
        is_average: whether it is the loss of the averaged weights.
    """

    data: DataIdentity
    num_items: int
    seed: int
    is_average: bool

    def document(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        items = {**asdict(self.data), "num_measured": self.num_items}
        return {"items": items, "seed": self.seed, "is_average": self.is_average}

    def differing(self, saved: Mapping[str, Any] | None) -> list[str]:
        """Settings that make it another one than that of the document ``saved``; all of them without one."""
        given = self.document()
        return [name for key, name in _SETTINGS.items() if saved is None or saved.get(key) != given[key]]
