"""This file holds what happens after a step: the engine's report, metrics, checkpoints, previews."""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator

from diffsynth_lite.core.gradient import GradientEngine, IneffectiveSwitchError
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.averaging import AveragedWeights
from diffsynth_lite.training.evaluation import FixedNoiseLoss
from diffsynth_lite.training.optimizer_step import StepResult
from diffsynth_lite.training.previews import Previews
from diffsynth_lite.training.processes import on_main_process
from diffsynth_lite.training.run_folder.metrics import MetricsLog
from diffsynth_lite.training.run_folder.progress import Pace, peak_memory_gib

logger = logging.getLogger(__name__)


@dataclass
class EngineReport:
    """Proves after the first step that the switches that are on had an effect, and logs what they did.

    Attributes:
        engine: that the step ran in.
        use_gradient_checkpointing: the switch.
        use_gradient_checkpointing_offload: the switch.
        save_attention: whether attention outputs are to be saved.
        expected_block_runs: calls of blocks that one step makes.
        expected_checkpointed: those of them that the policy checkpoints.
        metrics: gets the numbers.
    """

    engine: GradientEngine
    use_gradient_checkpointing: bool
    use_gradient_checkpointing_offload: bool
    save_attention: bool
    expected_block_runs: int
    expected_checkpointed: int
    metrics: MetricsLog
    _done: bool = False

    def after_step(self, result: StepResult) -> None:
        """Report once.

        Raises:
            UserError: a switch that is on did nothing.
        """
        if self._done:
            return
        self._done = True
        report = self.engine.report()
        try:
            report.require_effect(
                use_gradient_checkpointing=self.use_gradient_checkpointing,
                use_gradient_checkpointing_offload=self.use_gradient_checkpointing_offload,
                save_attention=self.save_attention,
                expected_blocks=self.expected_block_runs,
                expected_checkpointed=self.expected_checkpointed,
            )
        except IneffectiveSwitchError as error:
            section = "memory" if str(error).startswith("save_attention") else "train"
            raise UserError(f"{section}.{error}") from error
        for line in report.lines():
            logger.info("%s", line)
        self.metrics.log(result.step, report.metrics())


@dataclass(frozen=True, kw_only=True)
class LogMetrics:
    """Logs a step's numbers.

    Attributes:
        metrics: gets them.
        pace: of the run.
        device: whose peak memory is logged.
        every_steps: interval in optimizer steps.
    """

    metrics: MetricsLog
    pace: Pace
    device: torch.device
    every_steps: int

    def after_step(self, result: StepResult) -> None:
        """Log the first step and every so many."""
        if result.step != 1 and result.step % self.every_steps:
            return
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": result.learning_rate,
            "samples_per_s": self.pace.samples_per_s,
            "peak_memory_gib": peak_memory_gib(self.device),
        }
        self.metrics.log(result.step, values)


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measures the fixed-noise loss and draws the previews, on the main process; the others wait.

    Attributes:
        transformer: with its adapter, not wrapped.
        averaged: weights to evaluate with; None takes the model's own.
        validation_loss: to measure.
        previews: to draw.
        metrics: gets the loss.
        consider: told each step and its loss, with the model's own weights in place.
        accelerator: of the run.
    """

    transformer: torch.nn.Module
    averaged: AveragedWeights | None
    validation_loss: FixedNoiseLoss
    previews: Previews
    metrics: MetricsLog
    consider: Callable[[int, float], None]
    accelerator: Accelerator

    def at(self, step: int) -> None:
        """Evaluate after ``step`` optimizer steps."""
        with nullcontext() if self.averaged is None else self.averaged.applied():
            loss = on_main_process(self.accelerator, lambda: self._evaluate(step))
        self.consider(step, math.nan if loss is None else loss)

    def _evaluate(self, step: int) -> float | None:
        values = self.validation_loss.measure(self.transformer)
        self.metrics.log(step, values)
        for name, value in values.items():
            logger.info("After step %d: %s %.4f.", step, name, value)
        self.previews.draw(self.transformer, step)
        return values.get(self.validation_loss.name)
