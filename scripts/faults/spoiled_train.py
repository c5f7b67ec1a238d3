"""The training command, in which one process meets NaN and infinity at some steps; each notes what it skips.

The first argument is json: the process (``rank``), what is spoiled at which step (``steps``, from 1), and the
folder of the notes. The others are those of the training command.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from recorded_train import Loss, replaced_loss

from diffsynth_lite.cli.train import main
from diffsynth_lite.data import Batch
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects

NAN, INFINITY = float("nan"), float("inf")
_train_step = trainer.train_step


def spoiled_step(rank: str, steps: dict[int, str], notes: Path) -> Any:
    """`train_step` whose loss is spoiled on one process; each process notes all steps that it has skipped."""
    skipped: list[int] = []

    def train_step(built: TrainingObjects, step: int) -> StepResult:
        what = steps.get(step) if os.environ["RANK"] == rank else None
        loss = built.loss if what is None else _spoiled(built.loss, what)
        try:
            with replaced_loss(built, loss):
                return _train_step(built, step)
        finally:
            if built.divergence.num_skipped_in_a_row:
                skipped.append(step)
                (notes / os.environ["RANK"]).write_text(json.dumps(skipped))

    return train_step


def _spoiled(own_loss: Loss, what: str) -> Loss:
    def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if what == "latents":
            batch = dataclasses.replace(batch, latents=batch.latents * NAN)
        if what == "captions":
            conditioning = [
                {
                    name: value * INFINITY if value.is_floating_point() else value
                    for name, value in entry.items()
                }
                for entry in batch.conditioning
            ]
            batch = dataclasses.replace(batch, conditioning=conditioning)
        value = own_loss(model, batch)
        if what == "gradient":
            value.register_hook(lambda gradient: gradient * INFINITY)
        return value * NAN if what == "loss" else value

    return loss


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    steps = {int(step): what for step, what in plan["steps"].items()}
    trainer.train_step = spoiled_step(plan["rank"], steps, Path(plan["notes"]))
    sys.exit(main(sys.argv[2:]))
