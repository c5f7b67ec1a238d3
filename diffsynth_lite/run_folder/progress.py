"""This file shows each step of a run: in the progress line, in ``status.json`` and in a row of metrics."""

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from threading import Lock

import torch
from rich.console import Console
from rich.progress import Progress, TaskID, TextColumn

from diffsynth_lite.errors import RunDivergedError
from diffsynth_lite.progress_log import Phase
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import RATE_OF_GROUP, STEP_SECONDS, MetricsLog, metrics_by_noise
from diffsynth_lite.run_folder.speed import MachineState, SpeedWatch

if sys.platform != "win32":
    import resource

logger = logging.getLogger(__name__)

_SMOOTHING = 0.9
_STATUS_EVERY_S = 5.0
_PHASE_EVERY_S = 1.0
_MAX_LAST_STEPS = 100
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of one optimizer step.

    Attributes:
        loss: mean over the samples of all devices that are learned; None where all are preserved.
        preservation_loss: mean over the samples that are preserved; None where none is.
        video_loss: the part of ``loss`` from the frames of the learned samples; None without audio.
        audio_loss: mean over the learned samples with audio, before its weight; None where none has any.
        positive_loss: mean over the samples at strength 1 of a slider, as ``negative_loss`` at -1; None for
            other objectives.
        grad_norm: before clipping.
        group_rates: learning rate by the name of each group of layers; empty where there is only one group.
        learned_rate: learning rate that the optimizer found itself, times the configured one, after the step;
            None for other optimizers.
        num_samples: on all devices.
        sizes: of the micro-batches of this process, in words.
        seconds: from asking for the data to the changed weights.
        parts: seconds of ``STEP_PARTS``, as far as the device has come since the last step.
        num_skipped: steps of the run that were skipped up to now, this one included.
        totals_by_noise: for each tenth of the noise levels the sum of its samples' losses, then for each
            their number, on all devices since the last logged step; empty for a step that is not logged.
    """

    step: int
    loss: float | None
    grad_norm: float
    learning_rate: float
    num_samples: int
    seconds: float
    sizes: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    preservation_loss: float | None = None
    video_loss: float | None = None
    audio_loss: float | None = None
    positive_loss: float | None = None
    negative_loss: float | None = None
    num_skipped: int = 0
    group_rates: Mapping[str, float] = field(default_factory=dict)
    learned_rate: float | None = None
    totals_by_noise: Sequence[float] = ()


def is_logged(step: int, every_steps: int) -> bool:
    """Whether a step gets a row of metrics: the first one, and every so many."""
    return step == 1 or step % every_steps == 0


def peak_memory_gib(device: torch.device) -> float:
    """Most memory used so far in GiB: of the CUDA device, or of the whole process on other devices."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / _GIB
    if sys.platform == "win32":
        return math.nan  # The standard library cannot measure it.
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
        if result.loss is not None and math.isfinite(result.loss):
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
        rate = result.learning_rate if result.learned_rate is None else result.learned_rate
        loss = "nan" if self._loss is None else f"{self._loss:.4f}"
        return (
            f"loss {loss} lr {rate:.2e} {self.samples_per_s:.3g} samples/s "
            f"left {_clock(self.seconds_left(result))} peak {peak_memory_gib(device):.2f} GiB"
        )


class RunningStatus:
    """Writes ``status.json`` while a run trains, at most every 5 seconds, and while it does anything else.

    Where the disk is full it is left out, with one warning: a checkpoint ends the run soon enough.

    Args:
        clock: returns seconds.

    Attributes:
        step: that the run is at.
    """

    def __init__(self, folder: RunFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.step = 0
        self._folder = folder
        self._clock = clock
        self._facts: Mapping[str, float] = {}
        self._phase: Phase | None = None
        self._written_at = -math.inf
        self._has_failed = False
        # Files are downloaded in several threads.
        self._lock = Lock()

    def show_step(self, step: int, facts: Mapping[str, float]) -> None:
        """Write the step that the training is at, unless the status was just written."""
        self.step, self._facts = step, facts
        if self._phase is not None or self._clock() - self._written_at >= _STATUS_EVERY_S:
            self.end_phase()

    def show_phase(self, phase: Phase, done: int, total: int) -> None:
        """Write what the run does besides training: when that begins, and then at most every second."""
        with self._lock:
            is_same = phase == self._phase
            if is_same and self._clock() - self._written_at < _PHASE_EVERY_S:
                return
            self._phase = phase
            counts = {"done": done, "of": total} if total else {}
            self._write(phase, {"phase": phase, **counts})

    def end_phase(self) -> None:
        """Write that the run trains."""
        self._phase = None
        self._write("training", {})

    def _write(self, message: str, facts: Mapping[str, float | str]) -> None:
        self._written_at = self._clock()
        progress = {**self._facts, **facts}
        try:
            self._folder.write_status(
                "running", exit_code=None, step=self.step, message=message, progress=progress
            )
        except OSError as error:
            if not self._has_failed:
                logger.warning("%s could not be written: %s", self._folder.status_file, error)
            self._has_failed = True


@dataclass
class StepReport:
    """Shows each step that a run takes: people in a terminal, in a log file and in the run folder.

    Args:
        status: None in processes that are not the main one, which show nothing in a terminal.
        metrics: get a row for the first step and for every so many.
        every_steps: interval of rows, and of log lines if no terminal shows a live line.
    """

    status: RunningStatus | None
    metrics: MetricsLog
    _: KW_ONLY
    device: torch.device
    start_step: int
    total_steps: int
    every_steps: int
    _live: tuple[Progress, TaskID] | None = None

    def __post_init__(self) -> None:
        self._throughput = Throughput(total_steps=self.total_steps)
        self._watch = SpeedWatch(partial(MachineState.read, self.device))
        self._seconds: dict[str, float] = {}
        self._num_steps = 0
        self._without_row: deque[tuple[int, dict[str, float]]] = deque(maxlen=_MAX_LAST_STEPS)

    @contextmanager
    def shown(self, console: Console) -> Iterator[None]:
        """Scope of the progress line, which is live where the console is a terminal.

        If the run diverges, its last steps get rows whatever the interval, as they show the cause.
        """
        with ExitStack() as open_line:
            if self.status is not None and console.is_terminal:
                progress = open_line.enter_context(
                    Progress(TextColumn("{task.description}"), console=console)
                )
                task = progress.add_task("first step", total=self.total_steps, completed=self.start_step)
                self._live = (progress, task)
            try:
                yield
            except RunDivergedError:
                for step, values in self._without_row:
                    self.metrics.log(step, values)
                raise

    def after_step(self, result: StepResult, *, has_compiled: bool = False) -> None:
        """Show one more step; the caller checks that the folder is still the run's."""
        self._throughput.update(result)
        for part, seconds in result.parts.items():
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        self._num_steps += 1
        if not has_compiled:
            self._watch.after_step(result.sizes, result.seconds, result.parts)
        self._show_line(result)
        if self.status is not None:
            self.status.show_step(result.step, self._facts(result))
        losses = {
            "loss": result.loss,
            "preservation_loss": result.preservation_loss,
            "video_loss": result.video_loss,
            "audio_loss": result.audio_loss,
            "positive_loss": result.positive_loss,
            "negative_loss": result.negative_loss,
        }
        values = {
            **{name: loss for name, loss in losses.items() if loss is not None},
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "samples_per_s": self._throughput.samples_per_s,
            "peak_memory_gib": peak_memory_gib(self.device),
        }
        values |= {f"{RATE_OF_GROUP}{name}": rate for name, rate in result.group_rates.items()}
        if result.learned_rate is not None:
            values["learned_rate"] = result.learned_rate
        if result.num_skipped:
            values["skipped_steps"] = result.num_skipped
        if is_logged(result.step, self.every_steps):
            parts = {
                f"{STEP_SECONDS}{part}": total / self._num_steps for part, total in self._seconds.items()
            }
            self.metrics.log(result.step, values | parts | metrics_by_noise(result.totals_by_noise))
            self._seconds.clear()
            self._num_steps = 0
            self._without_row.clear()
        else:
            self._without_row.append((result.step, values))

    def _show_line(self, result: StepResult) -> None:
        is_due = result.step % self.every_steps == 0 or result.step == self.total_steps
        if self._live is None and not is_due:
            return
        line = f"step {result.step}/{self.total_steps} {self._throughput.describe(result, self.device)}"
        if self._live is None:
            logger.info("%s", line)
            return
        progress, task = self._live
        progress.update(task, completed=result.step, description=line)

    def _facts(self, result: StepResult) -> dict[str, float]:
        return {
            "total_steps": self.total_steps,
            "samples_per_s": round(self._throughput.samples_per_s, 4),
            "seconds_left": round(self._throughput.seconds_left(result)),
            "skipped_steps": result.num_skipped,
        }


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * value


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
