"""What a step of a real run holds, counted tensor by tensor as a device would."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TinyRun

from diffsynth_lite.core.planning import CountingMeter
from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training import trainer
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.shortages import MemoryUse
from faults.bench import train

_MEASURED_STEP = 3
"""The moments are there, and the engine knows what blocks share."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of a step: of frozen weights, of what is trained with its moments, and at most beside them."""

    weights: int
    trained: int
    step: int

    @property
    def total(self) -> int:
        """What a device would need."""
        return self.weights + self.trained + self.step


def held_by(run: TinyRun, folder: Path, *settings: str) -> Held:
    """Train a few steps, and count what the last of them held on its device."""
    found: list[Held] = []
    train_step = trainer.train_step

    def measured(built: TrainingObjects, step: int) -> StepResult:
        if step < _MEASURED_STEP:
            return train_step(built, step)
        parameters = list(built.transformer.parameters())
        state = [value for entry in built.optimizer.state.values() for value in entry.values()]
        meter = CountingMeter()
        with pytest.MonkeyPatch.context() as patch, meter:
            patch.setattr(PlainBackend, "allocate_host", _not_counted(meter))
            meter.start()
            result = train_step(built, step)
        held = Held(
            weights=_num_bytes(tensor for tensor in parameters if not tensor.requires_grad)
            + built.weights.slot_bytes,
            trained=_num_bytes(tensor for tensor in parameters if tensor.requires_grad) + _num_bytes(state),
            step=meter.peak_bytes,
        )
        found.append(held)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "train_step", measured)
        code = train(run, folder, f"train.steps={_MEASURED_STEP}", *settings)
    assert code == 0, code
    return found[0]


def _not_counted(meter: CountingMeter) -> Any:
    allocate = PlainBackend.allocate_host

    def allocate_host(self: PlainBackend, num_bytes: int, descriptor: int = -1) -> torch.Tensor | None:
        buffer = allocate(self, num_bytes, descriptor)
        if buffer is not None:
            meter.ignore(buffer)
        return buffer

    return allocate_host


@contextmanager
def device_that_counts(held: Held) -> Iterator[None]:
    """Scope in which the answer to a full device knows its peak, as on a device that counts it."""
    use_of = MemoryUse.of

    def counted(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **slots: int) -> MemoryUse:
        return dataclasses.replace(use_of(model, optimizer, **slots), peak=held.total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryUse, "of", staticmethod(counted))
        yield


def _num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)
