"""This file shows how a run goes: one line in a terminal, one log line now and then elsewhere."""

import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

_SMOOTHING = 0.9
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step did.

    Attributes:
        step: number of optimizer steps done, this one included.
        loss: mean over the samples of all devices.
        grad_norm: before clipping.
        learning_rate: used in this step.
        num_samples: that it took, on all devices.
        seconds: from asking for the data to the changed weights.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_samples: int
    seconds: float


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far in GiB: of the CUDA device, or of the whole process on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    if sys.platform == "win32":
        return math.nan  # The standard library cannot tell.
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit / _GIB


class Pace:
    """Smoothed speed and loss of a run."""

    def __init__(self, *, total_steps: int) -> None:
        self._total_steps = total_steps
        self._samples: float | None = None
        self._seconds: float | None = None
        self._loss: float | None = None

    def update(self, result: StepResult) -> None:
        """Take one more step into account."""
        self._samples = _smooth(self._samples, result.num_samples)
        self._seconds = _smooth(self._seconds, result.seconds)
        if math.isfinite(result.loss):
            self._loss = _smooth(self._loss, result.loss)

    @property
    def samples_per_s(self) -> float:
        """Samples trained on per second, over all devices."""
        return self._samples / self._seconds if self._samples and self._seconds else 0.0

    def seconds_left(self, result: StepResult) -> float:
        """How long the steps after this one will take, previews and checkpoints not counted."""
        return (self._total_steps - result.step) * (self._seconds or 0.0)

    def describe(self, result: StepResult, device: torch.device) -> str:
        """Loss, learning rate, speed, time left and peak memory as one line."""
        return (
            f"loss {_number(self._loss)} lr {result.learning_rate:.2e} {self.samples_per_s:.3g} samples/s "
            f"left {_clock(self.seconds_left(result))} peak {peak_memory_gib(device):.2f} GiB"
        )


class ProgressLine:
    """The progress line: live in a terminal, a log line every few steps otherwise."""

    def __init__(
        self, pace: Pace, *, start_step: int, total_steps: int, every_steps: int, device: torch.device
    ) -> None:
        self._pace = pace
        self._start_step = start_step
        self._total_steps = total_steps
        self._every_steps = every_steps
        self._device = device
        self._live: tuple[Progress, TaskID] | None = None

    @contextmanager
    def shown(self, console: Console, *, live: bool) -> Iterator[None]:
        """Show the line inside the block, live where the console is a terminal."""
        if not live:
            yield
            return
        with Progress(TextColumn("{task.description}"), console=console) as progress:
            task = progress.add_task("first step", total=self._total_steps, completed=self._start_step)
            self._live = (progress, task)
            yield

    def update(self, result: StepResult) -> None:
        """Show one more step."""
        self._pace.update(result)
        line = f"step {result.step}/{self._total_steps} {self._pace.describe(result, self._device)}"
        if self._live is not None:
            progress, task = self._live
            progress.update(task, completed=result.step, description=line)
        elif result.step % self._every_steps == 0 or result.step == self._total_steps:
            logger.info("%s", line)


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * value


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
