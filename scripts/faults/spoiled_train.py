"""The training command, in which one process meets NaN and infinity at some steps; each notes what it skips.

The first argument is json: the process (``rank``), what is spoiled at which step (``steps``, from 1), and the
folder of the notes. The others are those of the training command.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffsynth_lite.cli.train import main
from diffsynth_lite.data import Batch
from diffsynth_lite.training.optimizer_step import OptimizerStep, StepResult

NAN, INFINITY = float("nan"), float("inf")
_take, _skip = OptimizerStep.take, OptimizerStep._skip


def spoiled_take(rank: str, steps: dict[int, str]) -> Any:
    """`OptimizerStep.take` whose loss is spoiled on one process."""

    def take(self: OptimizerStep, step: int) -> StepResult:
        what = steps.get(step + 1)
        if what is None or os.environ["RANK"] != rank:
            return _take(self, step)

        def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            return _spoiled_loss(self, model, batch, what)

        return _take(dataclasses.replace(self, loss=loss), step)

    return take


def _spoiled_loss(step: OptimizerStep, model: torch.nn.Module, batch: Batch, what: str) -> torch.Tensor:
    if what == "latents":
        batch = dataclasses.replace(batch, latents=batch.latents * NAN)
    if what == "captions":
        conditioning = [
            {name: value * INFINITY if value.is_floating_point() else value for name, value in entry.items()}
            for entry in batch.conditioning
        ]
        batch = dataclasses.replace(batch, conditioning=conditioning)
    value = step.loss(model, batch)
    if what == "gradient":
        value.register_hook(lambda gradient: gradient * INFINITY)
    return value * NAN if what == "loss" else value


def noted_skip(notes: Path) -> Any:
    """`OptimizerStep._skip` that also writes down all steps that this process has skipped."""
    skipped: list[int] = []

    def skip(
        self: OptimizerStep, step: int, loss: float, norm: float, micro_batches: Sequence[Batch]
    ) -> None:
        skipped.append(step)
        (notes / os.environ["RANK"]).write_text(json.dumps(skipped))
        _skip(self, step, loss, norm, micro_batches)

    return skip


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    steps = {int(step): what for step, what in plan["steps"].items()}
    OptimizerStep.take = spoiled_take(plan["rank"], steps)  # type: ignore[method-assign]
    OptimizerStep._skip = noted_skip(Path(plan["notes"]))  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))
