"""What people see of each step: the progress line, ``status.json`` and a row of metrics."""

from contextlib import AbstractContextManager

import torch
from rich.console import Console

from diffsynth_lite.training.run_folder.folder import RunFolder
from diffsynth_lite.training.run_folder.metrics import MetricsLog
from diffsynth_lite.training.run_folder.progress import Pace, ProgressLine, StepResult, peak_memory_gib
from diffsynth_lite.training.run_folder.status import LiveStatus


class StepReport:
    """Shows each step that a run takes.

    Args:
        folder: of ``status.json``.
        metrics: gets a row of the first step and of every so many.
        device: whose peak memory is told.
        is_main: the other processes show nothing in a terminal, and write nothing.
        start_step: optimizer steps done before.
        total_steps: optimizer steps of the whole run.
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
        self._pace = Pace(total_steps=total_steps)
        self._line = ProgressLine(
            self._pace, start_step=start_step, total_steps=total_steps, every_steps=every_steps, device=device
        )
        self._status = LiveStatus(folder=folder, pace=self._pace, total_steps=total_steps)

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
                "samples_per_s": self._pace.samples_per_s,
                "peak_memory_gib": peak_memory_gib(self._device),
            }
            self._metrics.log(result.step, values)
