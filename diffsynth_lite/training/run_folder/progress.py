"""What people see of each step: a progress line or log lines, ``status.json``, and rows of metrics."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from diffsynth_lite.training.run_folder.folder import RunFolder
from diffsynth_lite.training.run_folder.metrics import MetricsLog

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

_SMOOTHING = 0.9
_RENEWED_EVERY_S = 5.0
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


class Throughput:
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
        self,
        throughput: Throughput,
        *,
        start_step: int,
        total_steps: int,
        every_steps: int,
        device: torch.device,
    ) -> None:
        self._throughput = throughput
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
        self._throughput.update(result)
        line = f"step {result.step}/{self._total_steps} {self._throughput.describe(result, self._device)}"
        if self._live is not None:
            progress, task = self._live
            progress.update(task, completed=result.step, description=line)
        elif result.step % self._every_steps == 0 or result.step == self._total_steps:
            logger.info("%s", line)


@dataclass(kw_only=True)
class LiveStatus:
    """Keeps the status of a run that goes on up to date: after its first step, then at most every 5 seconds.

    Attributes:
        throughput: has taken in each step before this does.
        clock: seconds, from any beginning on.
    """

    folder: RunFolder
    throughput: Throughput
    total_steps: int
    clock: Callable[[], float] = time.monotonic
    _renewed_at: float = -math.inf
    _failed: bool = False

    def after_step(self, result: StepResult) -> None:
        """Write which step the run has reached, unless that was done just now.

        A disk that is full gets one warning: the next checkpoint will end the run.
        """
        now = self.clock()
        if now - self._renewed_at < _RENEWED_EVERY_S:
            return
        self._renewed_at = now
        progress = {
            "total_steps": self.total_steps,
            "samples_per_s": round(self.throughput.samples_per_s, 4),
            "seconds_left": round(self.throughput.seconds_left(result)),
            "time": round(time.time(), 3),
        }
        try:
            self.folder.write_status(
                "running", exit_code=None, step=result.step, message="training", progress=progress
            )
        except OSError as error:
            if not self._failed:
                logger.warning("%s could not be written: %s", self.folder.status_file, error)
            self._failed = True


class StepReport:
    """Shows each step that a run takes.

    Args:
        folder: of ``status.json``.
        metrics: gets a row of the first step and of every so many.
        device: whose peak memory is shown.
        is_main: the other processes show nothing in a terminal, and write nothing.
        start_step: steps done before.
        total_steps: steps of the whole run.
        every_steps: interval of rows, and of log lines where there is no terminal.
    """

    def __init__(
        self,
        folder: RunFolder,
        metrics: MetricsLog,
        *,
        device: torch.device,
        is_main: bool,
        start_step: int,
        total_steps: int,
        every_steps: int,
    ) -> None:
        self._metrics = metrics
        self._device = device
        self._is_main = is_main
        self._every_steps = every_steps
        self._throughput = Throughput(total_steps=total_steps)
        self._line = ProgressLine(
            self._throughput,
            start_step=start_step,
            total_steps=total_steps,
            every_steps=every_steps,
            device=device,
        )
        self._status = LiveStatus(folder=folder, throughput=self._throughput, total_steps=total_steps)

    def shown(self, console: Console) -> AbstractContextManager[None]:
        """Scope of the progress line, which is live where the console is a terminal."""
        return self._line.shown(console, live=self._is_main and console.is_terminal)

    def after_step(self, result: StepResult) -> None:
        """Show one more step."""
        self._line.update(result)
        if self._is_main:
            self._status.after_step(result)
        if result.step == 1 or result.step % self._every_steps == 0:
            values = {
                "loss": result.loss,
                "grad_norm": result.grad_norm,
                "learning_rate": result.learning_rate,
                "samples_per_s": self._throughput.samples_per_s,
                "peak_memory_gib": peak_memory_gib(self._device),
            }
            self._metrics.log(result.step, values)


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * value


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
