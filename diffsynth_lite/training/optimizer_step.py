"""This file takes one optimizer step over the micro-batches that belong to it."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator

from diffsynth_lite.core.randomness import random_state_scope, torch_seed
from diffsynth_lite.data import Batch
from diffsynth_lite.errors import RunStoppedError
from diffsynth_lite.training.averaging import AveragedWeights

logger = logging.getLogger(__name__)

_MAX_SKIPPED_IN_A_ROW = 5

LossFunction = Callable[[torch.nn.Module, Batch], torch.Tensor]


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


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """One optimizer step: accumulate, clip, step. Each of its samples weighs the same.

    Attributes:
        accelerator: gives backward, gradient synchronisation and the mean over devices.
        model: as prepared by the accelerator.
        optimizer: over the trained parameters.
        loss: of a micro-batch; knows the model, which this file does not.
        learning_rate: of the 0-based optimizer step.
        max_grad_norm: gradients are scaled down to it; infinity never clips.
        averaged: takes the weights in after each step that is not skipped; None averages nothing.
        seed: of the dropout masks.
        batches: the micro-batches of each optimizer step, in order.
        skipped: the steps in a row, up to now, that were skipped.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction
    learning_rate: Callable[[int], float]
    max_grad_norm: float
    averaged: AveragedWeights | None
    seed: int
    batches: Iterator[Sequence[Batch]]
    skipped: list[int] = field(default_factory=list)

    def take(self, step: int) -> StepResult:
        """Train on the next micro-batches, those of the 0-based optimizer step.

        A step whose loss or gradients are not finite is skipped: the weights stay as they were.

        Raises:
            RunStoppedError: too many steps in a row were skipped.
        """
        started_at = time.perf_counter()
        micro_batches = next(self.batches)
        learning_rate = self.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        loss = self._accumulate_gradients(micro_batches)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        # One transfer for both: reading from the device waits for it. Both are the same on all devices.
        mean_loss, norm = torch.stack([loss, grad_norm]).tolist()
        if math.isfinite(mean_loss) and math.isfinite(norm):
            self.optimizer.step()
            if self.averaged is not None:
                self.averaged.update()
            self.skipped.clear()
        else:
            self._skip(step + 1, mean_loss, norm, micro_batches)
        self.optimizer.zero_grad()
        return StepResult(
            step=step + 1,
            loss=mean_loss,
            grad_norm=norm,
            learning_rate=learning_rate,
            num_samples=micro_batches[0].step_samples,
            seconds=time.perf_counter() - started_at,
        )

    def _skip(self, step: int, loss: float, norm: float, micro_batches: Sequence[Batch]) -> None:
        """Leave a step out; the data, the schedule and the step counter go on, the optimizer does not."""
        self.skipped.append(step)
        names = ", ".join(name for batch in micro_batches for name in batch.names)
        logger.warning("Step %d is skipped: loss %s, gradient norm %s, on %s.", step, loss, norm, names)
        if len(self.skipped) >= _MAX_SKIPPED_IN_A_ROW:
            raise RunStoppedError(
                f"step {step}: loss and gradients were not finite in {len(self.skipped)} steps in a row; "
                f"last on {names}. Checkpoints hold finite weights only. Look at these items, or start a new "
                "run with a lower train.learning_rate or train.mixed_precision=no"
            )

    def _accumulate_gradients(self, micro_batches: Sequence[Batch]) -> torch.Tensor:
        total = torch.zeros((), device=self.accelerator.device)
        for place, batch in enumerate(micro_batches):
            with self._gradient_sync(last=place == len(micro_batches) - 1):
                seed = torch_seed(self.seed, "dropout", batch.positions[0])
                with random_state_scope(self.accelerator.device, seed):
                    loss = self.loss(self.model, batch) / self._parts(batch)
                self.accelerator.backward(loss)
            total += loss.detach()
        mean: torch.Tensor = self.accelerator.reduce(total, reduction="mean")
        return mean

    def _parts(self, batch: Batch) -> float:
        """What a micro-batch's loss is divided by, so that all samples of the step weigh the same.

        The mean over devices divides by their number once more. Equal micro-batches give their number.
        """
        num_processes: int = self.accelerator.num_processes
        return batch.step_samples / (len(batch.positions) * num_processes)

    def _gradient_sync(self, *, last: bool) -> AbstractContextManager[None]:
        """Devices exchange gradients once a step, with the last micro-batch."""
        no_sync: AbstractContextManager[None] = self.accelerator.no_sync(self.model)
        return nullcontext() if last else no_sync
