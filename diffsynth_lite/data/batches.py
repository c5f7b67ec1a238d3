"""This file gives the training loop its batches: cached tensors, noise, and the draws that become timesteps.

All of it is a function of the seed and the positions of the samples. In shapes, B is the number of samples of
a micro-batch; latents have whatever further shape the encoder gave them.
"""

import dataclasses
import logging
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from diffsynth_lite.core.randomness import normal, uniform
from diffsynth_lite.data.cache import TensorCache
from diffsynth_lite.data.encoding import EncodedItem
from diffsynth_lite.data.schedule import BatchLayout, SampleSchedule
from diffsynth_lite.errors import RunStoppedError

logger = logging.getLogger(__name__)

WORKER_TIMEOUT_S = 300.0
"""Wait for a worker before giving up; without a limit a hung file system hangs the run for ever."""

KEPT_BYTES = 256 * 2**20
"""Entries that each reading process keeps in memory; reading a small one costs more than what is in it."""

_SECONDS_AFTER_SIGTERM = 600


@dataclass(frozen=True)
class Sample:
    """What stands at one position of the sample stream."""

    position: int
    name: str
    latents: Tensor
    conditioning: dict[str, Tensor]
    """What the caption encoder gave; lengths differ between samples."""

    noise: Tensor
    """Standard normal, float32, shaped like the latents."""

    uniform: float
    """Draw in [0, 1) that the timestep density turns into a noise level."""


@dataclass(frozen=True)
class Batch:
    """The samples of one forward pass, on the CPU."""

    positions: list[int]
    names: list[str]
    latents: Tensor
    """(B, ...), in the encoder's precision."""

    noise: Tensor
    """(B, ...), float32."""

    uniform: Tensor
    """(B,), float32, in [0, 1)."""

    conditioning: list[dict[str, Tensor]]
    """B entries, left uncollated because their lengths differ; shared, so not to be changed in place."""

    def pin_memory(self) -> "Batch":
        """Copy in page-locked memory; `DataLoader` calls this."""
        return dataclasses.replace(
            self,
            latents=self.latents.pin_memory(),
            noise=self.noise.pin_memory(),
            uniform=self.uniform.pin_memory(),
            conditioning=[
                {name: tensor.pin_memory() for name, tensor in entry.items()} for entry in self.conditioning
            ],
        )


class BatchStream:
    """Endless iterable over optimizer steps; each is the list of micro-batches of this process.

    The stream holds no state: the same step gives the same samples, noise and draws whatever the number of
    processes and workers, and a run resumes by starting at its next step.

    Args:
        items: the data set, in the order that the schedule's indices mean.
        cache: where the tensors of ``items`` are.
        schedule: which item stands at which position.
        seed: seed of the run.
        global_batch_size: samples of an optimizer step, over all processes.
        micro_batch_size: samples of one forward pass.
        num_processes: processes of the run.
        process_index: number of this process.
        num_workers: processes that read ahead; 0 reads in this one.
        start_step: optimizer step that the iteration starts with.

    Raises:
        UserError: the batch sizes do not fit together.
    """

    def __init__(
        self,
        items: Sequence[EncodedItem],
        cache: TensorCache,
        schedule: SampleSchedule,
        *,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        num_processes: int,
        process_index: int,
        num_workers: int,
        start_step: int,
    ) -> None:
        assert schedule.num_items == len(items)
        self.layout = BatchLayout(
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,
            num_processes=num_processes,
            process_index=process_index,
        )
        self._samples = _Samples(items, cache, schedule, seed)
        self._num_workers = num_workers
        self._start_step = start_step
        if len(items) < global_batch_size:
            logger.warning(
                "global_batch_size %d is more than the %d items: a step sees some of them twice",
                global_batch_size,
                len(items),
            )

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step, from the first step on, for ever.

        Raises:
            RunStoppedError: a cache entry has vanished or was damaged since the caching pass.
        """
        batches = iter(self._loader())
        while True:
            yield [_or_raise(next(batches)) for _ in range(self.layout.num_micro_steps)]

    def _loader(self) -> "DataLoader[Sample | RunStoppedError]":
        return DataLoader(
            self._samples,
            batch_sampler=self._micro_batches(),
            collate_fn=_collate,
            num_workers=self._num_workers,
            # Forked workers can deadlock on a lock that a thread of this process held, and know its CUDA.
            multiprocessing_context="spawn" if self._num_workers else None,
            worker_init_fn=_outlive_stop_signals,
            timeout=WORKER_TIMEOUT_S if self._num_workers else 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # else the loader draws a number from torch's global generator
        )

    def _micro_batches(self) -> Iterator[list[int]]:
        step = self._start_step
        while True:
            for micro_step in range(self.layout.num_micro_steps):
                yield list(self.layout.micro_batch(step, micro_step))
            step += 1


class _Samples(Dataset[Sample | RunStoppedError]):
    """Position to sample; an error is returned, because torch adds the traceback to one raised here."""

    def __init__(
        self, items: Sequence[EncodedItem], cache: TensorCache, schedule: SampleSchedule, seed: int
    ) -> None:
        self._items = items
        self._cache = cache
        self._schedule = schedule
        self._seed = seed
        self._kept: dict[str, dict[str, Tensor]] = {}
        self._kept_bytes = 0

    def __getitem__(self, position: int) -> Sample | RunStoppedError:
        item = self._items[self._schedule.item(position)]
        image, caption = self._read(item.latents_key), self._read(item.caption_key)
        if image is None or caption is None:
            return RunStoppedError(
                f"{item.name}: its entry in the cache {self._cache.folder} is damaged or gone; "
                "the same command encodes it again and continues"
            )
        latents = image["latents"]
        return Sample(
            position=position,
            name=item.name,
            latents=latents,
            conditioning=caption,
            noise=normal(self._seed, "noise", position, latents.shape),
            uniform=uniform(self._seed, "timestep", position),
        )

    def _read(self, key: str) -> dict[str, Tensor] | None:
        """Read an entry and keep it while there is room; all are wanted equally often, so none makes way."""
        if key in self._kept:
            return self._kept[key]
        tensors = self._cache.read(key)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values()) if tensors else 0
        if tensors and self._kept_bytes + num_bytes <= KEPT_BYTES:
            self._kept[key] = tensors
            self._kept_bytes += num_bytes
        return tensors


def _collate(samples: Sequence[Sample | RunStoppedError]) -> Batch | RunStoppedError:
    whole: list[Sample] = []
    for sample in samples:
        if isinstance(sample, RunStoppedError):
            return sample
        whole.append(sample)
    return Batch(
        positions=[sample.position for sample in whole],
        names=[sample.name for sample in whole],
        latents=torch.stack([sample.latents for sample in whole]),
        noise=torch.stack([sample.noise for sample in whole]),
        uniform=torch.tensor([sample.uniform for sample in whole], dtype=torch.float32),
        conditioning=[sample.conditioning for sample in whole],
    )


def _or_raise(batch: Batch | RunStoppedError) -> Batch:
    if isinstance(batch, RunStoppedError):
        raise batch
    return batch


def _outlive_stop_signals(worker_id: int) -> None:
    """Stop signals reach a whole process group, and the main process needs its workers to finish its step.

    SIGTERM is also how a stuck worker is ended at exit, so it starts a countdown that ends the worker.
    """
    for name in ("SIGINT", "SIGUSR1"):
        if hasattr(signal, name):  # Windows has no SIGUSR1
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_SECONDS_AFTER_SIGTERM))
