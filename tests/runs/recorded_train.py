"""The training command, with a record of every sample that is trained on: a process of its own runs this.

The first argument is the folder of the records, a file of JSON lines for each process; the others are those
of the training command.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from diffsynth_lite.cli.train import main
from diffsynth_lite.data.batches import Batch

if TYPE_CHECKING:  # the workers that read ahead import this file too, and need nothing else
    from diffsynth_lite.run_folder.progress import StepResult
    from diffsynth_lite.training.builder import TrainingObjects

Loss = Callable[[torch.nn.Module, Batch], torch.Tensor]


def recorded_step(folder: Path) -> Callable[["TrainingObjects", int], "StepResult"]:
    """`train_step` that also writes the samples of each step down, in a file for each process."""
    from diffsynth_lite.training import trainer

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"process-{os.environ.get('RANK', '0')}.jsonl"
    train_step = trainer.train_step

    def train_step_recorded(built: "TrainingObjects", step: int) -> "StepResult":
        losses = built.losses

        def recorded_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            with path.open("a") as file:
                file.writelines(json.dumps(row | {"step": step - 1}) + "\n" for row in _rows(batch))
            return next(losses(model, batch))

        with replaced_loss(built, recorded_loss):
            return train_step(built, step)

    return train_step_recorded


@contextmanager
def replaced_loss(built: "TrainingObjects", loss: Loss) -> Iterator[None]:
    """Scope in which a run has another loss."""
    own = built.losses
    # When it is asked for, as dropout is seeded then.
    built.losses = lambda model, batch: (one(model, batch) for one in [loss])
    try:
        yield
    finally:
        built.losses = own


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
    from diffsynth_lite.training import trainer

    trainer.train_step = recorded_step(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
