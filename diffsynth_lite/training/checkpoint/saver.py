"""This file saves a run as a checkpoint and a LoRA, keeps the best of them, and restores a run."""

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from diffsynth_lite.errors import CheckpointError
from diffsynth_lite.files import set_aside
from diffsynth_lite.lora import (
    adapter_settings,
    adapter_tensors,
    by_peft_names,
    exported_tensors,
    load_adapter_tensors,
)
from diffsynth_lite.lora.metadata import LoraFacts, NoiseRange, lora_metadata
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.checkpoint.divergence import Divergence
from diffsynth_lite.training.checkpoint.manifest import (
    Checkpoint,
    folder_name,
    read_checkpoint,
)
from diffsynth_lite.training.checkpoint.resume import Lineage, RunFingerprint
from diffsynth_lite.training.checkpoint.store import CheckpointStore, SavedBytes
from diffsynth_lite.training.distributed.agreement import on_main_process, tensors_from_main_process
from diffsynth_lite.training.evaluation import ValidationProtocol
from diffsynth_lite.training.lora_file import export_lora
from diffsynth_lite.training.optimization.averages import AveragedWeights, MovingAverage
from diffsynth_lite.training.optimization.optimizer_state import load_optimizer, optimizer_tensors

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Saver:
    """Writes checkpoints of a run, and the LoRA for inference with each.

    Attributes:
        transformer: with its adapter, not wrapped.
        thumbnail: of the last previews up to a step, as a data URL; None where there is none.
        keeps_best: whether the checkpoint with the lowest loss on held-out data is kept.
        best: step, loss and validation protocol of that checkpoint; None before the first, and where the
            protocol was another one.
    """

    folder: RunFolder
    store: CheckpointStore
    family: ModelFamily
    transformer: torch.nn.Module
    optimizer: torch.optim.Optimizer
    averaged: AveragedWeights | None
    optimizer_bytes: int
    accelerator: Accelerator
    fingerprint: RunFingerprint
    facts: LoraFacts
    thumbnail: Callable[[int], str | None]
    write_card: Callable[[Path, int], None]
    run_id: str
    lineage: Lineage
    resolved_yaml: str
    lora_dtype: torch.dtype
    keeps_best: bool
    protocol: ValidationProtocol
    divergence: Divergence
    best: dict[str, Any] | None
    _saved_step: int | None = None
    _rounding: float = 0.0

    def __post_init__(self) -> None:
        changed = self.protocol.changed_settings(self.best.get("measured_by")) if self.best else []
        if self.best and self.keeps_best and changed:
            logger.warning(
                "The loss of the best checkpoint (step %d, loss %.4f) cannot be compared with later ones "
                "(changed or unknown: %s). Tracking of the best checkpoint starts over.",
                self.best["step"],
                self.best["loss"],
                ", ".join(changed),
            )
            self.best = None
        self.store.pinned = self.best["step"] if self.best else None

    @property
    def measures_average(self) -> bool:
        """Whether the loss on held-out data is the average's."""
        return self.protocol.is_average

    @property
    def num_bytes(self) -> int:
        """Size of a save."""
        trained = [weight for weight in self.transformer.parameters() if weight.requires_grad]
        saved = SavedBytes.of(
            sum(weight.numel() for weight in trained),
            num_in_vectors=sum(weight.numel() for weight in trained if weight.ndim == 1),
            optimizer_bytes=self.optimizer_bytes,
            lora_dtype=self.lora_dtype,
            has_average=self.averaged is not None,
        )
        return saved.checkpoint + saved.lora

    def save(self, step: int) -> None:
        """Save the run after ``step`` optimizer steps, once for each of them; call it on all processes.

        Raises:
            RunDivergedError: the weights or the LoRA's update are not finite.
        """
        on_main_process(self.accelerator, lambda: self._write(step))

    def log_rounding_error(self) -> None:
        """Log how much the dtype of the last LoRA file changed its update, if at all."""
        if self._rounding == 0:
            return
        name = str(self.lora_dtype).removeprefix("torch.")
        logger.info(
            "The LoRA file is in %s: its update is that of the checkpoint to %.2g %%.",
            name,
            100 * self._rounding,
        )
        if self.lora_dtype == torch.float16 and self._rounding > torch.finfo(torch.bfloat16).eps:
            logger.warning(
                "Many numbers of this LoRA are too small for float16; bfloat16 would lose less "
                "(output.lora_dtype)."
            )

    def update_best(self, step: int, loss: float) -> None:
        """Keep the checkpoint of ``step`` and its LoRA if none had a lower loss; call it on all processes.

        Args:
            loss: on held-out data; only the main process's counts.
        """
        if self.keeps_best:
            on_main_process(self.accelerator, lambda: self._update_best(step, loss))

    def repair_best(self) -> None:
        """Export the best checkpoint's LoRA again; call it at a start, on all processes.

        The exported one is of another checkpoint where a trainer was killed between the two, or resumes from
        before the best. Without a best checkpoint it is set aside, and tracking starts over.
        """
        if self.keeps_best:
            on_main_process(self.accelerator, self._repair_best)

    def _repair_best(self) -> None:
        folder = self.folder.best_lora_folder
        tensors = self._best_tensors() if self.best else None
        if tensors is not None:
            assert self.best is not None
            describe = self._description(self.best["step"], is_average=self.measures_average)
            self._write_lora(folder, tensors, describe)
            self.write_card(folder, self.best["step"])
        elif folder.exists():
            aside = set_aside(folder, "left")
            logger.warning("%s is not of a checkpoint of this run; moved to %s.", folder, aside)

    def _best_tensors(self) -> dict[str, torch.Tensor] | None:
        """The best checkpoint's adapter or average; None, and no best, where that cannot be read."""
        assert self.best is not None
        try:
            best = read_checkpoint(self.store.folder / folder_name(self.best["step"]))
            return by_peft_names(best.tensors("ema")) if self.measures_average else best.tensors("adapter")
        except CheckpointError as error:
            logger.warning(
                "The best checkpoint (step %d, loss %.4f) cannot be used: %s. Tracking of the best "
                "checkpoint starts over.",
                self.best["step"],
                self.best["loss"],
                error,
            )
            self.best = self.store.pinned = None
            return None

    def _update_best(self, step: int, loss: float) -> None:
        is_trained = step > 0
        if not is_trained or not math.isfinite(loss) or (self.best and self.best["loss"] <= loss):
            return
        self.best = {"step": step, "loss": loss, "measured_by": self.protocol.document()}
        self.store.pinned = step
        self._write(step)
        self._export(self.folder.best_lora_folder, step, average=self.measures_average)
        logger.info("Step %d is the best so far: loss %.4f on validation.data.", step, loss)

    def _write(self, step: int) -> None:
        if step == self._saved_step:
            return
        self.divergence.note_save(step)
        self.store.known_good = self.divergence.sound_step
        self.folder.sync_rows()
        adapter = adapter_tensors(self.transformer)
        moments, groups = optimizer_tensors(self.optimizer, dict(self.transformer.named_parameters()))
        tensors = {"adapter": adapter, "optimizer": moments}
        state = {"step": step, "run_id": self.run_id, "lineage": self.lineage, "best": self.best}
        state["divergence"] = self.divergence.document()
        if self.averaged is not None:
            tensors["ema"] = self.averaged.tensors()
        if isinstance(self.averaged, MovingAverage):
            state["ema_updates"] = self.averaged.num_updates
        self.folder.require_held()
        documents = {
            "optimizer": groups,
            "state": state,
            "contract": self.fingerprint,
            "config": self.resolved_yaml,
        }
        with self.divergence.explained():
            self.store.save(step, tensors=tensors, documents=documents)
            is_result = self.averaged is not None and self.averaged.is_result
            self._export(self.folder.lora_folder, step, average=is_result)
            if self.averaged is not None and not is_result:
                self._export(self.folder.ema_lora_folder, step, average=True)
        # Last: where the export fails, the next attempt must export again.
        self._saved_step = step

    def _export(self, folder: Path, step: int, *, average: bool) -> None:
        describe = self._description(step, is_average=average)
        with self.averaged.applied() if average and self.averaged else nullcontext():
            self._write_lora(folder, adapter_tensors(self.transformer), describe)
        self.write_card(folder, step)

    def _write_lora(
        self,
        folder: Path,
        tensors: dict[str, torch.Tensor],
        describe: Callable[[NoiseRange], Mapping[str, str]],
    ) -> None:
        # Before and after, as diffusers makes a run folder again that is gone.
        self.folder.require_held()
        exported = export_lora(
            self.family,
            folder,
            exported_tensors(self.transformer, tensors, self.accelerator.device),
            adapter_settings(self.transformer),
            describe,
            dtype=self.lora_dtype,
        )
        self.folder.require_held()
        self._rounding = exported.rounding

    def _description(self, step: int, *, is_average: bool) -> Callable[[NoiseRange], Mapping[str, str]]:
        """Metadata of a file with the weights of a step, by the noise levels that it is for."""
        thumbnail = self.thumbnail(step)

        def describe(noise_range: NoiseRange) -> dict[str, str]:
            return lora_metadata(
                self.facts, step=step, is_average=is_average, noise_range=noise_range, thumbnail=thumbnail
            )

        return describe


def restore(
    checkpoint: Checkpoint,
    transformer: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    averaged: AveragedWeights | None,
    *,
    accelerator: Accelerator,
) -> None:
    """Restore the adapter, its average and the optimizer's state, before the model is wrapped.

    A run that keeps an average from this start on begins it at the adapter's restored values.

    Args:
        accelerator: its main process reads the checkpoint, which the others may not have; call this on all.
    """

    def read(name: str) -> dict[str, torch.Tensor]:
        return tensors_from_main_process(accelerator, lambda: checkpoint.tensors(name))

    load_adapter_tensors(transformer, read("adapter"))
    load_optimizer(
        optimizer,
        dict(transformer.named_parameters()),
        read("optimizer"),
        checkpoint.documents["optimizer"],
    )
    if not isinstance(averaged, MovingAverage):
        return
    updates = checkpoint.documents["state"].get("ema_updates")
    if updates is None:
        averaged.restart()
    else:
        averaged.load(read("ema"), updates)
