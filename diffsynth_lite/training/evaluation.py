"""This file measures the model between steps: its loss on fixed items and noise, and the LoRA's updates.

It also logs the losses of samples as they were trained on.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator

from diffsynth_lite.core.evaluation_mode import evaluation_mode
from diffsynth_lite.core.noise.losses import SampleLosses
from diffsynth_lite.core.randomness import normal
from diffsynth_lite.data.batches import AudioBatch, Batch
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.item_table import ItemRow
from diffsynth_lite.data.items import TrainingItem
from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.lora import UpdateSize, UpdateSizes
from diffsynth_lite.media import STRIP_FRAMES, frame_strip, jpeg_url
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.redaction import redacted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.run_folder.metrics import MeasuredItem, MetricsFile, read_items, write_items
from diffsynth_lite.run_folder.progress import is_logged
from diffsynth_lite.training.distributed.agreement import on_all_processes
from diffsynth_lite.training.objective import DenoisingObjective, SampleErrors

logger = logging.getLogger(__name__)

_PARTS = (1 / 6, 1 / 2, 5 / 6)
"""Fractions of the way from data to noise at which single items are measured."""

_THUMBNAIL_PX = 128
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ValidationItem:
    """An item on which the fixed-noise loss is measured.

    Attributes:
        bucket: sizes of the item and of its inputs.
        latents: (...), fp32.
        unconditional: the same with an empty caption, where that was encoded.
        loss_mask: (1, ...) at the size of the latents; None where every pixel counts.
        audio: ``audio_latents`` and ``has_audio`` of a clip that is learned with its audio; else empty.
    """

    bucket: Bucket
    latents: torch.Tensor
    conditioning: Conditioning
    unconditional: Conditioning | None = None
    loss_mask: torch.Tensor | None = None
    audio: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def batch_key(self) -> tuple[Bucket, torch.Size | None]:
        """What items of one batch have in common."""
        return self.bucket, None if self.loss_mask is None else self.loss_mask.shape


@dataclass(frozen=True, kw_only=True)
class FixedNoise:
    """An item with the noise that is put on it.

    Attributes:
        position: index of the noise among the random draws of its purpose.
        part: fraction of the way from data to noise, in [0, 1], over all noise levels that are trained.
    """

    item: ValidationItem
    position: int
    part: float


@dataclass(frozen=True, kw_only=True)
class FixedNoiseErrors:
    """Measures the model's error on items with chosen noise and noise levels.

    Attributes:
        seed: decides the noise, as ``purpose`` does.
        batch_size: items of one size in one forward.
    """

    objective: DenoisingObjective
    seed: int
    purpose: str
    batch_size: int

    def measure(self, transformer: torch.nn.Module, samples: Iterable[FixedNoise]) -> list[SampleErrors]:
        """The errors of each batch; all of them are in the order of the samples.

        Args:
            samples: those of one batch, and the one after it, are held at a time.
        """
        with evaluation_mode(transformer):
            return [self._errors(transformer, batch) for batch in self._batches(samples)]

    def _batches(self, samples: Iterable[FixedNoise]) -> Iterator[list[FixedNoise]]:
        """Samples that follow each other and whose items have one batch key."""
        for _, alike in groupby(samples, key=lambda sample: sample.item.batch_key):
            while batch := list(islice(alike, self.batch_size)):
                yield batch

    def _errors(self, transformer: torch.nn.Module, samples: Sequence[FixedNoise]) -> SampleErrors:
        items, positions = [sample.item for sample in samples], [sample.position for sample in samples]
        parts = [sample.part for sample in samples]
        masks = [item.loss_mask for item in items if item.loss_mask is not None]
        shape = items[0].latents.shape
        batch = Batch(
            bucket=items[0].bucket,
            positions=positions,
            names=[],
            latents=torch.stack([item.latents for item in items]),
            noise=torch.stack([normal(self.seed, self.purpose, position, shape) for position in positions]),
            uniform=torch.tensor(parts),
            conditioning=[item.conditioning for item in items],
            unconditional=[item.unconditional for item in items if item.unconditional is not None],
            loss_mask=torch.stack(masks) if masks else None,
            audio=AudioBatch.of(
                [item.audio for item in items], seed=self.seed, purpose=self.purpose, positions=positions
            ),
            step_samples=len(samples),
        )
        # Levels of audio's own are moved by a third, so that they cover the path as evenly.
        audio_sigma = None
        if self.objective.own_audio_levels:
            audio_sigma = self._levels([(part + 1 / 3) % 1 for part in parts])
        return self.objective.errors(transformer, batch, self._levels(parts), audio_sigma=audio_sigma)

    def _levels(self, parts: Sequence[float]) -> torch.Tensor:
        quantile = self.objective.noise_levels.quantile
        return torch.tensor([quantile(part) for part in parts], device=self.objective.device)


@dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """The loss on fixed noise of one evaluation.

    Attributes:
        values: the mean by the metric's name, then those of its parts; empty without items.
        by_item: the loss of each item, in their order.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    by_item: Sequence[float] = ()

    @property
    def mean(self) -> float:
        """Over the items; not a number without items."""
        return next(iter(self.values.values()), math.nan)

    def log(self, step: int) -> None:
        """Log each value; what is not finite as a warning."""
        for name, value in self.values.items():
            level = logging.INFO if math.isfinite(value) else logging.WARNING
            logger.log(level, "After step %d: %s %.4f.", step, name, value)


@dataclass(frozen=True, kw_only=True)
class FixedNoiseLoss:
    """The model's error on fixed items, noise and noise levels: a loss without the variance of random draws.

    Item i of n is (i + 0.5) / n of the way from data to noise, so that all of it is covered.
    """

    name: str
    items: Sequence[ValidationItem]
    errors: FixedNoiseErrors

    def measure(self, transformer: torch.nn.Module) -> MeasuredLoss:
        """The errors, by metric and by item."""
        if not self.items:
            return MeasuredLoss()
        samples = [
            FixedNoise(item=item, position=place, part=(place + 0.5) / len(self.items))
            for place, item in enumerate(self.items)
        ]
        errors = self.errors.measure(transformer, samples)
        total = sum(float(batch.total.sum()) for batch in errors)
        values = {self.name: total / len(self.items)} | self._parts(errors)
        return MeasuredLoss(values=values, by_item=torch.cat([batch.total for batch in errors]).tolist())

    def _parts(self, errors: Sequence[SampleErrors]) -> dict[str, float]:
        """Of items whose audio is learned: the mean error of the images, and of the audio that counts."""
        video = [batch.video for batch in errors if batch.audio is not None]
        audio = [
            batch.audio[batch.has_audio > 0]
            for batch in errors
            if batch.audio is not None and batch.has_audio is not None
        ]
        joined = {part: torch.cat(found) for part, found in (("video", video), ("audio", audio)) if found}
        return {f"{self.name}/{part}": float(values.mean()) for part, values in joined.items() if len(values)}


@dataclass(frozen=True, kw_only=True)
class TrackedItem:
    """A training item whose losses are logged one by one.

    Attributes:
        position: in the data, which decides its noise.
        read: gives its tensors, with that caption.
        thumbnail: returns a data URL of a small JPEG; None where none can be made.
    """

    position: int
    row: ItemRow
    caption: str
    read: Callable[[], ValidationItem]
    thumbnail: Callable[[], str | None]


def thumbnail_of(item: TrainingItem) -> str | None:
    """A data URL of a small JPEG; None, with a warning, where its file cannot be read."""
    try:
        frames = [frame.copy() for frame in item.few_frames(STRIP_FRAMES)]
        for frame in frames:
            frame.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
        strip = frame_strip(frames)
    except (UserError, OSError, MemoryError) as error:
        logger.warning("No thumbnail of %s: %s", item.name, error)
        return None
    return jpeg_url(strip)


class ItemLosses:
    """The loss of each of some training items on fixed noise: which of them are learned, and which not.

    Each is measured at the same noise levels, so that items compare, and with the same noise each time, so
    that only the training makes a difference.
    """

    def __init__(
        self,
        items: Sequence[TrackedItem],
        errors: FixedNoiseErrors,
        *,
        is_average: bool,
        folder: RunFolder,
        writes: bool = True,
    ) -> None:
        self.items, self.errors = items, errors
        self._is_average, self._folder, self._writes = is_average, folder, writes
        self._file = MetricsFile(folder.item_losses_file)
        self._noise_levels = [errors.objective.noise_levels.quantile(part) for part in _PARTS]
        self._is_described = False

    def record(self, transformer: torch.nn.Module, step: int) -> None:
        """Measure the items and write a row of their losses; on the main process only, or on all."""
        if not self.items:
            return
        # Level by level, so that one expert runs after the other. Read when it is their turn: those of clips
        # are tens of megabytes each.
        samples = (
            FixedNoise(item=item.read(), position=item.position * len(_PARTS) + place, part=part)
            for place, part in enumerate(_PARTS)
            for item in self.items
        )
        found = self.errors.measure(transformer, samples)
        errors = torch.cat([batch.total for batch in found]).tolist()
        if self._writes:
            self._write(errors, step)

    def _write(self, errors: Sequence[float], step: int) -> None:
        self._describe_once()
        before = self._file.rows()
        by_level = [errors[place :: len(self.items)] for place in range(len(self.items))]
        losses = [sum(levels) / len(levels) for levels in by_level]
        self._file.append(step, {"losses": losses, "by_level": by_level})
        if step > 0 and not before:
            logger.info("Losses of single items are measured from step %d on: the start is not known.", step)
        elif before:
            self._log(step, losses, before[0])

    def _describe_once(self) -> None:
        """Write the list of items, and remove losses that were measured in another way."""
        if self._is_described:
            return
        known = {item.measured_by: item.thumbnail for item in read_items(self._folder.items_file)}
        keys = [self._measured_by(item) for item in self.items]
        if list(known) != keys and self._file.rows():
            logger.warning(
                "Losses of single items are measured again from here on: those before are of other items, of "
                "another validation.seed, or of other weights (validation.use_ema)."
            )
            self._file.path.unlink()
        described = [
            MeasuredItem(
                name=item.row.name,
                caption=item.caption,
                size=item.row.bucket.name,
                noise_levels=self._noise_levels,
                measured_by=key,
                thumbnail=known.get(key) or item.thumbnail(),
            )
            for item, key in zip(self.items, keys, strict=True)
        ]
        write_items(self._folder.items_file, described)
        self._is_described = True

    def _measured_by(self, item: TrackedItem) -> str:
        decides = (
            *(item.row.media_key, item.row.caption_keys[0], item.position),
            *(self.errors.seed, self._noise_levels, self._is_average),
        )
        return hashlib.blake2b(repr(decides).encode(), digest_size=8).hexdigest()

    def _log(self, step: int, losses: Sequence[float], first: Mapping[str, Any]) -> None:
        """Log which items have the highest losses, and how many have risen."""
        named = sorted(zip(losses, self.items, strict=True), key=lambda pair: -pair[0])[:_NUM_NAMED]
        pairs = zip(losses, first["losses"], strict=True)
        logger.info(
            "After step %d: loss of %d single items: median %.4f, highest %s; above those of step %d: %d.",
            *(step, len(losses), median(losses)),
            join_names([f"{item.row.name} ({loss:.4f})" for loss, item in named]),
            first["step"],
            sum(before is not None and after > before for after, before in pairs),
        )


@dataclass(frozen=True, kw_only=True)
class SampleLossLog:
    """Writes the losses of samples to the run folder."""

    losses: SampleLosses
    file: MetricsFile
    accelerator: Accelerator
    every_steps: int

    def after_step(self, step: int) -> None:
        """Write a row after a step that is logged; called by all processes."""
        if is_logged(step, self.every_steps):
            self.write(step)

    def write(self, step: int) -> None:
        """Write a row of the samples since the last one, of all processes, which all call this."""
        found = on_all_processes(self.accelerator, self.losses.take)
        if not self.accelerator.is_main_process:
            return
        by_item: dict[str, list[list[float]]] = {}
        for name, *values in sorted(sample for samples in found for sample in samples):
            by_item.setdefault(redacted(name), []).append([float(f"{value:.4g}") for value in values])
        if by_item:
            self.file.append(step, {"samples": by_item})


class LayerUpdates:
    """Logs how large the LoRA's update of each layer is, and at the end how large they became."""

    def __init__(
        self,
        sizes: UpdateSizes,
        file: MetricsFile,
        *,
        last_step: int,
        rate_setting: str = "train.learning_rate",
        writes: bool = True,
    ) -> None:
        self._sizes, self._file, self._last_step, self._writes = sizes, file, last_step, writes
        self._rate_setting = rate_setting
        self._recorded_step: int | None = None

    def record(self, step: int, *, num_skipped: int) -> None:
        """Measure the updates after a step, once for each step; on the main process only, or on all.

        Args:
            num_skipped: those of them that changed nothing; where all did, nothing is logged at the end.
        """
        if step == self._recorded_step:
            return
        self._recorded_step, sizes = step, self._sizes.measure()
        if not self._writes:
            return
        self._file.append(step, {"updates": {name: size.ratio for name, size in sizes.items()}})
        if step == self._last_step and num_skipped < step:
            self._conclude(sizes)

    def _conclude(self, sizes: Mapping[str, UpdateSize]) -> None:
        """Log how large the updates are, and warn where they are practically nothing."""
        by_ratio = sorted(sizes.items(), key=lambda named: named[1].ratio)
        (_, median), (name, largest) = by_ratio[len(by_ratio) // 2], by_ratio[-1]
        logger.info(
            "LoRA update relative to the base weights over %d layers: median %.2g, at most %.2g (%s).",
            *(len(sizes), median.ratio, largest.ratio, name),
        )
        if all(size.is_lost_in_rounding for size in sizes.values()):
            logger.warning(
                "The LoRA changes practically nothing: of no layer does its update change the output by as "
                "much as rounding to bfloat16 does. Raise %s, or train for more steps.",
                self._rate_setting,
            )
