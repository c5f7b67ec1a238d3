"""The training command, with a record of every sample that is trained on: a process of its own runs this.

The first argument is the folder of the records, a file of JSON lines for each process; the others are those
of the training command.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from diffsynth_lite.cli.train import main
from diffsynth_lite.data import Batch
from diffsynth_lite.training.optimizer_step import OptimizerStep, StepResult


def recorded_take(folder: Path) -> Callable[[OptimizerStep, int], StepResult]:
    """`OptimizerStep.take` that also writes the samples of each step down, in a file for each process."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"process-{os.environ.get('RANK', '0')}.jsonl"
    take = OptimizerStep.take

    def take_recorded(self: OptimizerStep, step: int) -> StepResult:
        def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            with path.open("a") as file:
                file.writelines(json.dumps(row | {"step": step}) + "\n" for row in _rows(batch))
            return self.loss(model, batch)

        return take(dataclasses.replace(self, loss=loss), step)

    return take_recorded


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All samples of a run, in the order of their positions."""
    rows = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["position"]))


def _rows(batch: Batch) -> Iterator[dict[str, Any]]:
    for place, position in enumerate(batch.positions):
        tensors = {"latents": batch.latents[place], "noise": batch.noise[place], **batch.conditioning[place]}
        if batch.loss_mask is not None:
            tensors["loss_mask"] = batch.loss_mask[place]
        yield {
            "position": position,
            "name": batch.names[place],
            "bucket": batch.bucket.name,
            "uniform": batch.uniform[place].item(),
            "forward_samples": len(batch.positions),
            "step_samples": batch.step_samples,
            "tensors": _digests(tensors),
        }


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


if __name__ == "__main__":
    OptimizerStep.take = recorded_take(Path(sys.argv[1]))  # type: ignore[method-assign]
    sys.exit(main(sys.argv[2:]))
