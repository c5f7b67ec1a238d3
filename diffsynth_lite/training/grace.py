"""This file warns of a launcher that kills a stopped run before the run can have saved."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

logger = logging.getLogger(__name__)

_SAVED_BYTES_PER_S = 100 * 2**20
"""Of a save that was not measured yet; on a local disk it was 109 to 135 MiB/s, see docs/reliability.md."""
_ADVISED_MULTIPLE_S = 30


@dataclass(frozen=True, kw_only=True)
class StopGrace:
    """How long a launcher waits for its processes.

    Attributes:
        seconds: from the stop signal that it sends to the one that kills.
        setting: what changes that, an environment variable or an argument of the launcher; None where
            nothing does.
    """

    seconds: float
    setting: str | None


class StopTime:
    """How long a run needs from a stop signal to its checkpoint; warns once where that is more than it gets.

    At worst the signal comes at the beginning of a step after which previews and losses are due. The first
    step, which warms up, does not count, and of the others the longest but one does: a single one may be an
    accident.

    Args:
        grace: of the launcher; None where it gives no limit that is known, and nothing is said.
        save_bytes: that a save writes: tells its time until one is measured.
    """

    def __init__(self, grace: StopGrace | None, *, save_bytes: int) -> None:
        self._grace = grace
        self._steps_s: list[float] | None = None
        self._evaluation_s = 0.0
        self._estimated_save_s = save_bytes / _SAVED_BYTES_PER_S
        self._saves_s: list[float] = []

    def after_step(self, seconds: float) -> None:
        """Take into account how long one more step took."""
        if self._steps_s is None:
            self._steps_s = []
            return
        self._steps_s = sorted([*self._steps_s, seconds])[-2:]
        self._warn_once()

    @contextmanager
    def timing(self, part: Literal["evaluation", "save"]) -> Iterator[None]:
        """Scope of an evaluation or of a save, whose time counts unless it fails."""
        began_at = time.perf_counter()
        yield
        seconds = time.perf_counter() - began_at
        if part == "save":
            # The longest: a checkpoint that is there already takes no time.
            self._saves_s = [max([seconds, *self._saves_s])]
        else:
            self._evaluation_s = seconds
        self._warn_once()

    def _warn_once(self) -> None:
        if self._grace is None or self._steps_s is None or len(self._steps_s) < 2:
            return
        save_s = self._saves_s[0] if self._saves_s else self._estimated_save_s
        parts = {"step": self._steps_s[0], "evaluation": self._evaluation_s, "save": save_s}
        needed_s = sum(parts.values())
        if needed_s <= self._grace.seconds:
            return
        logger.warning(
            "%g s grace < %.1f s that a stop signal may wait for (%s): the launcher would kill the run "
            "before it has saved. %s",
            self._grace.seconds,
            needed_s,
            ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds),
            self._advice(needed_s, self._grace.setting),
        )
        self._grace = None

    def _advice(self, needed_s: float, setting: str | None) -> str:
        if setting is None:
            return (
                f"That of torch {torch.__version__} cannot wait longer, one of a newer torch can; otherwise "
                "lower what stands here, or save more often (output.checkpoint_every_minutes)."
            )
        advised_s = math.ceil(2 * needed_s / _ADVISED_MULTIPLE_S) * _ADVISED_MULTIPLE_S
        return f"Set {setting}={advised_s} where it is launched."
