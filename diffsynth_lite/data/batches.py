"""This file gives the training loop its batches: cached tensors, noise, and the draws that become timesteps.

All of it is a function of the seed and the positions of the samples. In shapes, B is the number of samples of
a micro-batch; latents have whatever further shape the encoder gave them.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from diffsynth_lite.core.randomness import normal, uniform
from diffsynth_lite.data.buckets import Bucket
from diffsynth_lite.data.item_table import ItemRow, ItemTable
from diffsynth_lite.data.records import Source
from diffsynth_lite.data.schedule import BatchLayout, SampleSchedule
from diffsynth_lite.data.workers import (
    WorkerContext,
    WorkerWatch,
    ignore_stop_signals,
    require_free_files,
    watched_batches,
)
from diffsynth_lite.errors import RunStoppedError, join_names

logger = logging.getLogger(__name__)

WORKER_TIMEOUT_S = 300.0
"""Wait for a worker before giving up; without a limit a hung file system hangs the run for ever."""

KEPT_BYTES = 256 * 2**20
"""Entries that each reading process keeps in memory."""

OF_AUDIO = ("audio_latents", "has_audio")
"""Tensors of an entry of media that are of its audio."""
NOT_CONDITIONING = ("latents", "loss_mask", *OF_AUDIO)
"""Tensors of an entry of media that the transformer is not conditioned on."""


class EntryReader(Protocol):
    """Source of the tensors of an item: the cache, or an encoder that makes them now."""

    def read(self, key: str) -> dict[str, Tensor] | None:
        """Tensors of an entry on the CPU, or None where there is none that is whole.

        Raises:
            RunStoppedError: the entry is damaged or missing, and cannot be made again.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class AudioBatch:
    """The audio of the samples of one forward pass, which is noised and trained on together with their clips.

    Attributes:
        latents: (B, ...), in the encoder's precision; the axes differ from those of the clips.
        noise: (B, ...), float32.
        uniform: (B,), float32, in [0, 1), for noise levels of its own; independent of those of the clips.
        has_audio: (B,), float32: 1 where a clip has audio, 0 where it is silent.
    """

    latents: Tensor
    noise: Tensor
    uniform: Tensor
    has_audio: Tensor

    @classmethod
    def of(
        cls, media: Sequence[Mapping[str, Tensor]], *, seed: int, purpose: str, positions: Sequence[int]
    ) -> "AudioBatch | None":
        """The audio of entries of media; None where they have none, as for images.

        Args:
            media: all of one size and length.
        """
        if "audio_latents" not in media[0]:
            return None
        latents = torch.stack([entry["audio_latents"] for entry in media])
        shape, levels = latents.shape[1:], f"audio-{purpose}-level"
        return cls(
            latents=latents,
            noise=torch.stack([normal(seed, f"audio-{purpose}", place, shape) for place in positions]),
            uniform=torch.tensor([uniform(seed, levels, place) for place in positions], dtype=torch.float32),
            has_audio=torch.stack([entry["has_audio"] for entry in media]),
        )

    def pin_memory(self) -> "AudioBatch":
        """Copy in page-locked memory."""
        return dataclasses.replace(self, **_pinned(vars(self)))


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A prompt that should look the same at any strength of a slider.

    Attributes:
        media_keys: entries of images of it; empty where it is learned on those of the samples.
    """

    caption_key: str
    media_keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SliderBatch:
    """The prompts of a slider for the samples of one forward pass, next to the neutral ones.

    Attributes:
        positive: B entries, as ``Batch.conditioning``, of the prompts of strength 1.
        negative: those of strength -1.
        kept: A entries, of anchors: one for each sample at an even position.
        latents: (A, ...), as ``Batch.latents``, of the anchors, as are the next two.
        noise: (A, ...), float32.
        uniform: (A,), float32.
    """

    positive: list[dict[str, Tensor]]
    negative: list[dict[str, Tensor]]
    kept: list[dict[str, Tensor]]
    latents: Tensor
    noise: Tensor
    uniform: Tensor

    def pin_memory(self) -> "SliderBatch":
        """Copy in page-locked memory."""
        return dataclasses.replace(self, **_pinned(vars(self)))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one forward pass, on the CPU.

    Attributes:
        positions: index of each sample in the run, consecutive.
        latents: (B, ...), in the encoder's precision.
        noise: (B, ...), float32.
        uniform: (B,), float32, in [0, 1), which the timestep density turns into noise levels.
        conditioning: B entries, left uncollated because their lengths differ; not to be changed in place.
        unconditional: B entries with an empty caption; an empty sequence where they are not needed.
        loss_mask: (B, 1, ...) at the size of the latents, 1 counts and 0 does not; None where all count.
        audio: of clips that are trained on with their audio; None for others.
        slider: the other prompts of a slider; None for other objectives.
        loss_weights: (B,), float32, multiply the losses; None where all samples of the run count alike.
        preserved: indices in the batch of the regularization samples, on which the model should stay as it is
            without the LoRA; None where neither this process nor those that run the model together with it
            have any at this step.
        step_samples: samples of this optimizer step, over all micro-steps and processes.
        step_uniform: in [0, 1), a draw that all samples of this optimizer step share.
    """

    bucket: Bucket
    positions: list[int]
    names: list[str]
    latents: Tensor
    noise: Tensor
    uniform: Tensor
    conditioning: list[dict[str, Tensor]]
    unconditional: list[dict[str, Tensor]] = dataclasses.field(default_factory=list)
    loss_mask: Tensor | None = None
    audio: AudioBatch | None = None
    slider: SliderBatch | None = None
    loss_weights: Tensor | None = None
    preserved: tuple[int, ...] | None = None
    step_samples: int
    step_uniform: float = 0.0

    def num_parts(self, num_data_ranks: int) -> float:
        """The divisor of the mean loss of this micro-batch, so that all samples of the step weigh the same.

        The mean over data ranks divides by their number once more. Equal micro-batches give their number.
        """
        return self.step_samples / (len(self.positions) * num_data_ranks)

    def pin_memory(self) -> "Batch":
        """Copy in page-locked memory; `DataLoader` calls this."""
        return dataclasses.replace(self, **_pinned(vars(self)))


def describe_sizes(micro_batches: Sequence[Batch]) -> str:
    """How many samples of which buckets a step has: steps for which it is the same take about as long."""
    counts: Counter[str] = Counter()
    for batch in micro_batches:
        counts[batch.bucket.name] += len(batch.positions)
    return ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))


def _pinned(value: Any) -> Any:
    """A copy of a value in page-locked memory: a tensor, or what holds some."""
    if isinstance(value, Tensor | AudioBatch | SliderBatch):
        return value.pin_memory()
    if isinstance(value, dict):
        return {name: _pinned(each) for name, each in value.items()}
    return [_pinned(each) for each in value] if isinstance(value, list) else value


class BatchStream:
    """Endless iterable over optimizer steps; each is the list of micro-batches of this process.

    The stream holds no state: the same step gives the same samples, noise and draws whatever the number of
    processes and workers, and a run resumes by starting at its next step.

    Args:
        layout: which blocks this process takes.
        num_workers: processes that read ahead; 0 reads in this one.
        caption_dropout: part of the samples that lose their caption, in [0, 1]; above 0 all items need an
            unconditional entry.
        with_unconditional: whether batches also have the unconditional entries, which all items then need.
        sources: by index, for weights of losses and regularization. Empty where all items are treated the
            same.
        runs_together: whether the processes run each forward pass together, each on samples of its own.
        anchors: of a slider, whose items have three captions for each triple; None for other objectives.
    """

    def __init__(
        self,
        items: ItemTable,
        entries: EntryReader,
        schedule: SampleSchedule,
        layout: BatchLayout,
        *,
        seed: int,
        num_workers: int,
        start_step: int,
        caption_dropout: float = 0.0,
        with_unconditional: bool = False,
        sources: Sequence[Source] = (),
        runs_together: bool = False,
        anchors: Sequence[Anchor] | None = None,
    ) -> None:
        self._items = items
        self._schedule = schedule
        self._layout = layout
        self._seed = seed
        weights = [source.loss_weight for source in sources]
        loss_weights = weights if set(weights) - {1.0} else None
        self._micro_batches = partial(
            _MicroBatches, entries, seed, caption_dropout, with_unconditional, loss_weights, anchors
        )
        self._num_workers = num_workers
        self._start_step = start_step
        self._preserved = frozenset(place for place, source in enumerate(sources) if source.preserve)
        self._runs_together = runs_together
        self._warn_of_few_items()

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step, from the first step on, for ever."""
        requests = self._requests()
        watch = WorkerWatch(num_workers=self._num_workers, limit_s=WORKER_TIMEOUT_S)
        if self._num_workers:
            require_free_files()
        batches = watched_batches(self._loader(requests, watch), watch)
        try:
            while True:
                yield [_or_raise(next(batches)) for _ in range(self._layout.num_micro_steps)]
        except (GeneratorExit, RunStoppedError):
            # A worker that is asked to end while its thread still hands a batch over aborts ("terminate
            # called without an active exception", torch 2.13), which torch may raise as an error of this
            # process.
            requests.close()
            for _ in batches:
                pass
            raise

    def _loader(
        self, requests: "Iterator[Request]", watch: WorkerWatch
    ) -> "DataLoader[Batch | RunStoppedError]":
        return DataLoader(
            self._micro_batches(watch),
            batch_size=None,
            # It runs in this process, so that workers need neither the table of the items nor the schedule.
            sampler=requests,
            num_workers=self._num_workers,
            multiprocessing_context=WorkerContext() if self._num_workers else None,
            worker_init_fn=ignore_stop_signals,
            timeout=WORKER_TIMEOUT_S if self._num_workers else 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else the loader draws a number from torch's global generator
        )

    def _requests(self) -> "Generator[Request, None, None]":
        layout, step = self._layout, self._start_step
        while True:
            # In order and once: the schedule keeps only the current cycle.
            blocks = [self._schedule.block(index) for index in layout.blocks_of_step(step)]
            step_samples = sum(map(len, blocks))
            for first in range(0, len(blocks), layout.num_processes):
                at_once = blocks[first : first + layout.num_processes]
                yield self._request(at_once, step_samples, step)
            step += 1

    def _request(self, at_once: Sequence[Mapping[int, int]], step_samples: int, step: int) -> "Request":
        """This process' share of the micro-batches that all processes take at the same time."""
        block = at_once[self._layout.process_index]
        looked_at = at_once if self._runs_together and self._preserved else [block]
        indices = chain.from_iterable(each.values() for each in looked_at)
        preserves = any(self._items.source(index) in self._preserved for index in indices)
        rows = tuple(map(self._items.row, block.values()))
        own = tuple(place for place, row in enumerate(rows) if row.source in self._preserved)
        return rows, partial(
            Batch,
            bucket=rows[0].bucket,
            positions=list(block),
            names=[row.name for row in rows],
            preserved=own if preserves else None,
            step_samples=step_samples,
            step_uniform=uniform(self._seed, "step", step),
        )

    def _warn_of_few_items(self) -> None:
        per_step = self._layout.global_batch_size
        if len(self._items) < per_step:
            logger.warning(
                "global_batch_size %d is more than the %d items: a step sees some of them twice",
                per_step,
                len(self._items),
            )
        counts, buckets = self._items.items_by_bucket, self._items.buckets
        small = [
            f"{buckets[place].name} ({count})"
            for place, count in counts.items()
            if count < self._schedule.sizes[place]
        ]
        if small:
            logger.warning("buckets with fewer items than a micro-batch repeat them: %s", join_names(small))


Request: TypeAlias = "tuple[tuple[ItemRow, ...], partial[Batch]]"
"""A micro-batch for a worker to read: its items, and the batch without tensors."""


class _MicroBatches(Dataset[Batch | RunStoppedError]):
    """Makes a batch of each request; returns errors, because torch adds a traceback to those raised here."""

    def __init__(
        self,
        entries: EntryReader,
        seed: int,
        caption_dropout: float,
        with_unconditional: bool,
        loss_weights: Sequence[float] | None,
        anchors: Sequence[Anchor] | None,
        watch: WorkerWatch,
    ) -> None:
        self._entries = entries
        self._seed = seed
        self._caption_dropout = caption_dropout
        self._with_unconditional = with_unconditional
        self._loss_weights = loss_weights
        self._anchors = anchors
        self._watch = watch
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._kept_bytes = 0

    def __getitem__(self, request: Request) -> Batch | RunStoppedError:
        with self._watch.batch():
            try:
                return self._batch(*request)
            except RunStoppedError as error:
                return error

    def _batch(self, rows: Sequence[ItemRow], batch: "partial[Batch]") -> Batch:
        media: list[dict[str, Tensor]] = []
        captions: list[dict[str, Tensor]] = []
        empty: list[dict[str, Tensor]] = []
        positions = batch.keywords["positions"]
        for position, row in zip(positions, rows, strict=True):
            media.append(self._read(row.media_key, row.name))
            captions.append(self._read(self._caption_key(row, position), row.name))
            if self._with_unconditional and row.unconditional_key:
                empty.append(self._read(row.unconditional_key, row.name))
        latents = torch.stack([entry["latents"] for entry in media])
        weights = self._loss_weights
        return batch(
            latents=latents,
            noise=torch.stack([normal(self._seed, "noise", place, latents.shape[1:]) for place in positions]),
            uniform=torch.tensor(
                [uniform(self._seed, "timestep", place) for place in positions], dtype=torch.float32
            ),
            conditioning=_conditioning(captions, media),
            unconditional=_conditioning(empty, media) if empty else [],
            loss_mask=_stacked_masks([entry.get("loss_mask") for entry in media]),
            audio=AudioBatch.of(media, seed=self._seed, purpose="noise", positions=positions),
            slider=None if self._anchors is None else self._slider(rows, positions, media, self._anchors),
            loss_weights=None if weights is None else torch.tensor([weights[row.source] for row in rows]),
        )

    def _triple(self, row: ItemRow, position: int) -> tuple[str, ...]:
        """Keys of the neutral, positive and negative prompt that are drawn for a sample."""
        draw = uniform(self._seed, "slider-triple", position)
        first = 3 * int(draw * (len(row.caption_keys) // 3))
        return row.caption_keys[first : first + 3]

    def _slider(
        self,
        rows: Sequence[ItemRow],
        positions: Sequence[int],
        media: Sequence[dict[str, Tensor]],
        anchors: Sequence[Anchor],
    ) -> SliderBatch:
        """The other prompts of samples, and anchors for every second position."""
        keys = [self._triple(row, position) for row, position in zip(rows, positions, strict=True)]
        positive, negative = (
            [self._read(key[end], row.name) for key, row in zip(keys, rows, strict=True)] for end in (1, 2)
        )
        captions, seen, places = [], [], []
        for own, position in zip(media, positions, strict=True):
            if position % 2 or not anchors:
                continue
            anchor = anchors[int(uniform(self._seed, "anchor", position) * len(anchors))]
            number = int(uniform(self._seed, "anchor-image", position) * len(anchor.media_keys))
            captions.append(self._read(anchor.caption_key, "anchor"))
            seen.append(self._read(anchor.media_keys[number], "anchor") if anchor.media_keys else own)
            places.append(position)
        shape = media[0]["latents"].shape
        noise = [normal(self._seed, "anchor-noise", place, shape) for place in places]
        draws = [uniform(self._seed, "anchor-timestep", place) for place in places]
        return SliderBatch(
            positive=_conditioning(positive, media),
            negative=_conditioning(negative, media),
            kept=_conditioning(captions, seen),
            latents=torch.stack([entry["latents"] for entry in seen or media])[: len(seen)],
            noise=torch.stack(noise) if noise else torch.empty(0, *shape),
            uniform=torch.tensor(draws, dtype=torch.float32),
        )

    def _caption_key(self, row: ItemRow, position: int) -> str:
        """Key of the caption that is drawn for a sample, or of the empty one."""
        dropout, variants = self._caption_dropout, row.caption_keys
        if self._anchors is not None:
            return self._triple(row, position)[0]
        if row.unconditional_key and uniform(self._seed, "caption-dropout", position) < dropout:
            return row.unconditional_key
        if len(variants) == 1:
            return variants[0]
        return variants[int(uniform(self._seed, "caption", position) * len(variants))]

    def _read(self, key: str, name: str) -> dict[str, Tensor]:
        """Read an entry and keep it while there is room; all are read equally often, so none is evicted."""
        if key in self._kept:
            return self._kept[key]
        self._watch.reads(f"{name} (cache entry {key})")
        try:
            tensors = self._entries.read(key)
        except RunStoppedError as error:
            raise RunStoppedError(f"{name}: {error}") from error
        if tensors is None:
            raise RunStoppedError(
                f"{name}: its entry in the cache is damaged or gone; "
                "the same command encodes it again and continues"
            )
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        if self._kept_bytes + num_bytes <= KEPT_BYTES:
            self._kept[key] = tensors
            self._kept_bytes += num_bytes
        return tensors


def _conditioning(
    captions: Sequence[dict[str, Tensor]], media: Sequence[dict[str, Tensor]]
) -> list[dict[str, Tensor]]:
    # Copied: a tensor from a worker is an open file for as long as it lives, and entries are kept.
    return [
        {name: tensor.clone() for name, tensor in (caption | entry).items() if name not in NOT_CONDITIONING}
        for caption, entry in zip(captions, media, strict=True)
    ]


def _stacked_masks(masks: Sequence[Tensor | None]) -> Tensor | None:
    """One mask for each sample, all ones for a sample without; None where no sample has a mask."""
    given = [mask for mask in masks if mask is not None]
    if not given:
        return None
    # A mask from a file has one frame for the whole clip; a mask that leaves out a first frame has all
    # frames.
    shape = [max(sides) for sides in zip(*(mask.shape for mask in given), strict=True)]
    return torch.stack([torch.ones(shape) if mask is None else mask.expand(shape) for mask in masks])


def _or_raise(batch: Batch | RunStoppedError) -> Batch:
    if isinstance(batch, RunStoppedError):
        raise batch
    return batch
