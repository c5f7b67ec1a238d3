"""This file saves a run as a checkpoint and a LoRA, keeps the best of them, and restores a run.

It also counts the bytes that a run will save, and checks before weights load that the disk holds them.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.errors import CheckpointError, UserError
from diffsynth_lite.files import free_disk_bytes, set_aside
from diffsynth_lite.lora import (
    adapter_settings,
    adapter_tensors,
    by_peft_names,
    exported_tensors,
    load_adapter_tensors,
)
from diffsynth_lite.lora.metadata import NoiseRange, lora_metadata
from diffsynth_lite.media import STRIP_FRAMES
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.run_folder.loras import SUFFIX, lora_copies
from diffsynth_lite.run_folder.model_card import CARD, IMAGES
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.checkpoint.comfyui_copies import ComfyuiCopies
from diffsynth_lite.training.checkpoint.manifest import (
    Checkpoint,
    folder_name,
    is_file_name,
    read_checkpoint,
)
from diffsynth_lite.training.data_settings import num_preview_frames, num_preview_layers
from diffsynth_lite.training.distributed.agreement import on_main_process, tensors_from_main_process
from diffsynth_lite.training.encoding.run_encoding import TrainingData
from diffsynth_lite.training.encoding.scored_prompts import NUM_PROMPTS
from diffsynth_lite.training.export.best_lora import follow_scores
from diffsynth_lite.training.export.card import CardWriter, gather_lora_facts
from diffsynth_lite.training.lora_file import export_lora
from diffsynth_lite.training.optimization.averages import AveragedWeights, MovingAverage
from diffsynth_lite.training.optimization.optimizer_state import load_optimizer, optimizer_tensors
from diffsynth_lite.training.optimization.optimizers import measures_average
from diffsynth_lite.training.preview_requests import preview_size
from diffsynth_lite.training.session import Run, Start
from diffsynth_lite.training.stopping import Patience

logger = logging.getLogger(__name__)

_MEASURED_BY = {
    "items": "held-out items and validation.loss_items",
    "seed": "validation.seed",
    "is_average": "validation.use_ema and train.ema_decay",
}
"""What decides how the validation loss is measured, by its key in a checkpoint: two losses compare only where
it is the same. What may never change in a run is left out."""

_NUM_ALWAYS_KEPT = 2
"""The newest checkpoint, and the one before it: until a step from the newest has had a finite loss."""
_BYTES_PER_PIXEL = 3
"""At most, in a PNG without its headers: content that cannot be compressed stays as it is."""


def measured_by(config: Config, data: TrainingData, *, is_average: bool) -> dict[str, Any]:
    """How the validation loss is measured, as a checkpoint keeps it."""
    items = {**asdict(data.validation_identity), "num_measured": len(data.validation_items)}
    return {"items": items, "seed": config.validation.seed, "is_average": is_average}


class Saver:
    """Writes checkpoints of a run, and the LoRA for inference with each.

    Attributes:
        measures_average: whether the loss on held-out data is the average's.
        patience: with evaluations that are not better, for ``train.stop_after``.
        best: step, loss and validation protocol of the checkpoint with the lowest loss on held-out data; None
            before the first, and where the protocol was another one.
    """

    def __init__(self, run: Run, start: Start, data: TrainingData, built: TrainingObjects) -> None:
        config, averaged = run.config, built.averaged
        self._run, self._start, self._built = run, start, built
        self._facts = gather_lora_facts(config, run.family, data, start.fingerprint)
        self.measures_average = measures_average(config, averaged)
        self._measured_by = measured_by(config, data, is_average=self.measures_average)
        self._card = CardWriter(
            config=config,
            family=run.family,
            facts=self._facts,
            previews=built.previews,
            loss_name=built.validation_loss.name,
            measures_average=self.measures_average and not self._exports_average,
            folder=run.folder,
            layers=run.checked.target_layers,
        )
        self.lora_dtype: torch.dtype = getattr(torch, config.output.lora_dtype)
        self._copies = ComfyuiCopies.of(config, run.family)
        self._keeps_best, self._follows_scores = (config.best_by == each for each in ("loss", "scores"))
        state = start.checkpoint.documents["state"] if start.checkpoint else {}
        best = None if self._follows_scores else state.get("best")
        self.best: dict[str, Any] | None = self._comparable(best)
        run.store.pinned = self.best["step"] if self.best else None
        waited, job = state.get("stop_after", {}), built.scores.job
        progress, every_steps = "a lower loss on held-out items", config.validation.every_steps
        self._compared_by = self._measured_by
        if config.validation.scores:
            progress, every_steps = "a higher score", config.score_every_steps
            self._compared_by = {"scores": job.measure if job else None}  # only the main process compares
        saved = waited if waited.get("measured_by") == self._compared_by else None
        self.patience = Patience(config.train.stop_after, every_steps, saved, progress)
        self._saved_step: int | None = None
        self._rounding = 0.0

    def _comparable(self, best: dict[str, Any] | None) -> dict[str, Any] | None:
        """The best checkpoint so far, unless its loss was measured in another way than later ones will be."""
        saved = best.get("measured_by") if best else None
        changed = [
            name
            for key, name in _MEASURED_BY.items()
            if saved is None or saved.get(key) != self._measured_by[key]
        ]
        if best and self._keeps_best and changed:
            logger.warning(
                "The loss of the best checkpoint (step %d, loss %.4f) cannot be compared with later ones "
                "(changed or unknown: %s). Tracking of the best checkpoint starts over.",
                best["step"],
                best["loss"],
                ", ".join(changed),
            )
            return None
        return best

    @property
    def _exports_average(self) -> bool:
        """Whether the average is the result of the run, rather than the trained values."""
        return self._built.averaged is not None and self._built.averaged.is_result

    def save(self, step: int) -> None:
        """Save the run after ``step`` optimizer steps, once for each of them; call it on all processes."""
        on_main_process(self._run.accelerator, self._write, step)

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

    def note_progress(self, step: int, losses: Sequence[float]) -> None:
        """Compare an evaluation with earlier ones: by the scores of the step where they are on, else by the
        losses of held-out items."""
        by_scores = self._run.config.validation.scores
        self.patience.note(step, self._built.scores.samples(step) if by_scores else [losses])

    def update_best(self, step: int, loss: float) -> None:
        """Keep the checkpoint of ``step`` and its LoRA if none had a lower loss; call it on all processes.

        Args:
            loss: on held-out data; only the main process's counts.
        """
        if self._keeps_best:
            on_main_process(self._run.accelerator, self._update_best, step, loss)

    def repair_loras(self) -> None:
        """Export the LoRAs again that a trainer that was killed may not have; call it at a start, on all
        processes.

        That of the checkpoint that the run resumes from, and that of the best one, which is of another where
        the run resumes from before the best. Without a best checkpoint it is set aside, and tracking starts
        over.
        """
        if self._keeps_best:
            on_main_process(self._run.accelerator, self._repair_best)
        on_main_process(self._run.accelerator, self._repair_copy)
        if self._follows_scores:
            on_main_process(self._run.accelerator, self._update_recommended)

    def _repair_copy(self) -> None:
        checkpoint, folder = self._start.checkpoint, self._run.store.folder
        if checkpoint is None or checkpoint.path.parent.resolve() != folder.resolve():
            return
        copies = [copy for export in self._exports() for copy in lora_copies(folder, export.name)]
        if [copy.step for copy in copies].count(checkpoint.step) < len(self._exports()):
            self._export_result(checkpoint.step)

    def _repair_best(self) -> None:
        folder = self._run.folder.best_lora_folder
        tensors = self._best_tensors() if self.best else None
        if tensors is not None:
            assert self.best is not None
            describe = self._description(self.best["step"], is_average=self.measures_average)
            self._write_lora(folder, tensors, describe)
            self._card.write(folder, self.best["step"])
        elif folder.exists():
            aside = set_aside(folder, "left")
            logger.warning("%s is not of a checkpoint of this run; moved to %s.", folder, aside)

    def _best_tensors(self) -> dict[str, torch.Tensor] | None:
        """The best checkpoint's adapter or average; None, and no best, where that cannot be read."""
        assert self.best is not None
        try:
            best = read_checkpoint(self._run.store.folder / folder_name(self.best["step"]))
            return by_peft_names(best.tensors("ema")) if self.measures_average else best.tensors("adapter")
        except CheckpointError as error:
            logger.warning(
                "The best checkpoint (step %d, loss %.4f) cannot be used: %s. Tracking of the best "
                "checkpoint starts over.",
                self.best["step"],
                self.best["loss"],
                error,
            )
            self.best = self._run.store.pinned = None
            return None

    def _update_best(self, step: int, loss: float) -> None:
        is_trained = step > 0
        if not is_trained or not math.isfinite(loss) or (self.best and self.best["loss"] <= loss):
            return
        self.best = {"step": step, "loss": loss, "measured_by": self._measured_by}
        self._run.store.pinned = step
        self._write(step)
        self._export(self._run.folder.best_lora_folder, step, average=self.measures_average)
        logger.info("Step %d is the best so far: loss %.4f on held-out items.", step, loss)

    def _update_recommended(self) -> None:
        """Have the best LoRA follow the scores of the steps that are saved."""
        folder, store = self._run.folder, self._run.store
        is_ema = self.measures_average and not self._exports_average
        export = folder.ema_lora_folder if is_ema else folder.lora_folder
        best = follow_scores(folder, export.name, kept=store.pinned)
        if best is not None and best != store.pinned:
            self._card.write(folder.best_lora_folder, best)
        store.pinned = best

    def _write(self, step: int) -> None:
        if step == self._saved_step:
            return
        run, built, averaged = self._run, self._built, self._built.averaged
        built.divergence.note_save(step)
        run.store.known_good = built.divergence.sound_step
        run.folder.sync_rows()
        adapter = adapter_tensors(built.transformer)
        moments, groups = optimizer_tensors(built.optimizer, dict(built.transformer.named_parameters()))
        tensors = {"adapter": adapter, "optimizer": moments}
        state = {
            "step": step,
            "run_id": self._start.run_id,
            "lineage": self._start.lineage,
            "best": self.best,
        }
        state["divergence"] = built.divergence.document()
        if run.config.train.stop_after is not None:
            state["stop_after"] = self.patience.document() | {"measured_by": self._compared_by}
        if averaged is not None:
            tensors["ema"] = averaged.tensors()
        if isinstance(averaged, MovingAverage):
            state["ema_updates"] = averaged.num_updates
        run.folder.require_held()
        documents = {
            "optimizer": groups,
            "state": state,
            "contract": self._start.fingerprint,
            "config": run.loaded.resolved_yaml,
        }
        with built.divergence.explained():
            run.store.save(step, tensors=tensors, documents=documents)
        self._export_result(step)
        if self._follows_scores:
            self._update_recommended()
        # Last: where the export fails, the next attempt must export again.
        self._saved_step = step

    def _exports(self) -> dict[Path, bool]:
        """The folders of the LoRA and, where it is another one, its average; whether each is the average."""
        folder = self._run.folder
        exports = {folder.lora_folder: self._exports_average}
        if self._built.averaged is not None and not self._exports_average:
            exports[folder.ema_lora_folder] = True
        return exports

    def _export_result(self, step: int) -> None:
        """Export the LoRA and its average, and keep copies by step."""
        with self._built.divergence.explained():
            for export, average in self._exports().items():
                files = self._export(export, step, average=average)
                card = [file for file in (export / CARD, *(export / IMAGES).glob("*")) if file.is_file()]
                files += [file for file in card if is_file_name(file.relative_to(export).as_posix())]
                self._run.store.keep_lora(step, export, files)
                if export == self._run.folder.lora_folder:
                    self._copies.write([file for file in files if file.suffix == SUFFIX])

    def _export(self, folder: Path, step: int, *, average: bool) -> list[Path]:
        describe, averaged = self._description(step, is_average=average), self._built.averaged
        with averaged.applied() if average and averaged else nullcontext():
            files = self._write_lora(folder, adapter_tensors(self._built.transformer), describe)
        self._card.write(folder, step)
        return files

    def _write_lora(
        self,
        folder: Path,
        tensors: dict[str, torch.Tensor],
        describe: Callable[[NoiseRange], Mapping[str, str]],
    ) -> list[Path]:
        run, transformer = self._run, self._built.transformer
        # Before and after, as diffusers makes a run folder again that is gone.
        run.folder.require_held()
        files, self._rounding = export_lora(
            run.family,
            folder,
            exported_tensors(transformer, tensors, run.accelerator.device),
            adapter_settings(transformer),
            describe,
            dtype=self.lora_dtype,
        )
        run.folder.require_held()
        return files

    def _description(self, step: int, *, is_average: bool) -> Callable[[NoiseRange], Mapping[str, str]]:
        """Metadata of a file with the weights of a step, by the noise levels that it is for."""
        thumbnail = self._built.previews.thumbnail(step)

        def describe(noise_range: NoiseRange) -> dict[str, str]:
            return lora_metadata(
                self._facts, step=step, is_average=is_average, noise_range=noise_range, thumbnail=thumbnail
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
        return tensors_from_main_process(accelerator, checkpoint.tensors, name)

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


def require_disk_space(run: Run, start: Start) -> None:
    """Check that the disk holds the checkpoints and LoRA files of a run."""
    needed, free = _needed_bytes(run, start), free_disk_bytes(run.store.folder)
    if free < needed:
        raise UserError(
            "output.dir: the checkpoints that exist at once and the LoRA files take about "
            f"{format_bytes(needed)} more, and {format_bytes(free)} are free at {run.store.folder.parent}; "
            "free space, keep fewer (output.keep_checkpoints, output.keep_every_steps, "
            "output.keep_adapters), or set another output.dir"
        )


def warn_of_previews(run: Run, start: Start) -> None:
    """Warn where previews and copies of the best so far may take the room that the checkpoints need."""
    needed, free = _needed_bytes(run, start), free_disk_bytes(run.store.folder)
    of_best = num_best_copies_to_come(run.config, start_step=start.step) * run.checked.saved.lora
    more = preview_bytes(run.config, run.family, start.step) + of_best
    if more and free < needed + more:
        what = (
            "previews, and copies of the LoRA of steps that are the best so far," if of_best else "previews"
        )
        fewer = ", or fewer copies (output.keep_adapters)" if of_best else ""
        logger.warning(
            "output.dir: %s may take up to %s next to the %s of checkpoints and LoRA files, and %s are "
            "free at %s. A full disk ends the run at its next checkpoint: generate fewer or smaller previews "
            "(validation.every_steps, validation.width, validation.height)%s, or free space.",
            *(what, format_bytes(more), format_bytes(needed), format_bytes(free), run.store.folder.parent),
            fewer,
        )


def num_checkpoints_to_come(config: Config, *, num_there: int, start_step: int) -> int:
    """How many more checkpoints exist at most at once: an old one is removed when a new one is complete."""
    output, steps = config.output, config.train.steps
    if start_step >= steps:
        return 0
    every, is_odd = output.checkpoint_every_steps, steps % output.checkpoint_every_steps > 0
    regular = range(every * (start_step // every + 1), steps + 1, every)
    num_kept = max(output.keep_checkpoints, _NUM_ALWAYS_KEPT)
    num_rotating = min(len(regular) + is_odd, num_kept + 1 - min(num_there, num_kept))
    # Those that are never removed, before the last ones.
    last = regular[len(regular) + is_odd - num_rotating :]
    for_good = output.keep_every_steps or steps + 1
    num_for_good = (last[0] - 1 if last else steps) // for_good - start_step // for_good
    has_best = config.best_by is not None and not num_there
    return num_rotating + num_for_good + has_best


def num_loras_to_come(config: Config, *, num_there: int, num_checkpoints: int, start_step: int) -> int:
    """How many more copies of the LoRA exist at most at once.

    Args:
        num_there: copies that are there.
        num_checkpoints: the checkpoints that exist at most at once, each of which has a copy.
    """
    output, steps = config.output, config.train.steps
    if start_step >= steps:
        return 0
    every = output.checkpoint_every_steps
    num_saves = steps // every - start_step // every + (steps % every > 0)
    if output.keep_adapters == "all":
        return num_saves
    return min(num_saves, max(0, num_checkpoints + output.keep_adapters - num_there))


def num_best_copies_to_come(config: Config, *, start_step: int) -> int:
    """Most copies of the LoRA that steps without a regular save leave, each as the best so far."""
    output, steps = config.output, config.train.steps
    every = config.validation.every_steps or steps
    if config.best_by != "loss":
        return 0
    evaluated = range(every * (start_step // every + 1), steps, every)
    num_more = sum(step % output.checkpoint_every_steps > 0 for step in evaluated)
    return num_more if output.keep_adapters == "all" else min(num_more, output.keep_adapters)


def preview_bytes(config: Config, family: ModelFamily, start_step: int) -> int:
    """Most bytes of the previews to come; of videos the strips of their frames, without the MP4."""
    steps = config.train.steps
    if start_step >= steps:
        return 0

    def num_times(every: int) -> int:
        return steps // every - start_step // every + (steps % every > 0) + (start_step == 0)

    num_previews = num_times(config.validation.every_steps or steps) * len(config.validation.prompts)
    num_scored = num_times(config.score_every_steps or steps) * 3 * NUM_PROMPTS * config.validation.scores
    width, height = preview_size(config, family)
    # Layers are in the strip, and in a file each.
    num_layers = 2 * num_preview_layers(config, family)
    num_images = num_layers or min(num_preview_frames(config, family), STRIP_FRAMES)
    image: int = _BYTES_PER_PIXEL * width * height * num_images
    return (num_previews + num_scored) * image


def _needed_bytes(run: Run, start: Start) -> int:
    config, saved = run.config, run.checked.saved
    num_there = len(run.store.steps())
    num_more = num_checkpoints_to_come(config, num_there=num_there, start_step=start.step)
    num_loras = num_loras_to_come(
        config,
        num_there=len(lora_copies(run.store.folder)),
        num_checkpoints=num_there + num_more,
        start_step=start.step,
    )
    # A LoRA file is written next to the one that it replaces.
    return num_more * saved.checkpoint + (num_loras + (1 if num_there else 2)) * saved.lora
