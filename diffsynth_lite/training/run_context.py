"""This file holds what every stage of a run needs: settings, places, the clock of its start, its kernels."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from diffsynth_lite.config import Config, LoadedConfig
from diffsynth_lite.errors import UserError
from diffsynth_lite.report.page import ReportWriter
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.checkpoint.resume import ResumePolicy, RunFingerprint, settings_fingerprint
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.checks import CheckedRun
from diffsynth_lite.training.data_settings import shifts_by_size
from diffsynth_lite.training.distributed.sharding import require_as_many_passes, require_same_expert
from diffsynth_lite.training.planning.memory_count import MemoryCount
from diffsynth_lite.training.stopping import GracePeriod

_NONE_THERE = "does not have a deterministic implementation"
"""torch has no class for this error, only these words."""


class StartupClock:
    """Seconds spent in the named stages of a start.

    Args:
        started_at: ``time.perf_counter()`` at the start of the program.
    """

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time inside the block to a stage."""
        entered_at = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - entered_at)

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere to a stage."""
        self._stages[name] = self._stages.get(name, 0.0) + seconds

    def describe(self) -> str:
        """All stages so far as one line, and what lies between them."""
        total = time.perf_counter() - self._started_at
        stages = {**self._stages, "other": total - sum(self._stages.values())}
        return (
            f"{total:.1f} s (" + ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items()) + ")"
        )


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What every stage of a run needs: settings, processes, places.

    Attributes:
        loaded: the config and its texts.
        accelerator: device and processes.
        folder: where the run writes.
        store: its checkpoints.
        checked: the base model and the data, as far as they are known before weights load.
        page: what a person opens to see how the run goes.
        console: where the progress line goes.
        clock: counts the start-up time.
        grace: how long the launcher waits for a run that it stops; None where that is not known.
        predicted: what a step takes, by count; None where nothing was chosen by that.
        chosen: what ``memory.auto`` chose that the run keeps when it goes on, by dotted key.
    """

    loaded: LoadedConfig
    accelerator: Accelerator
    folder: RunFolder
    store: CheckpointStore
    checked: CheckedRun
    page: ReportWriter
    console: Console
    clock: StartupClock
    grace: GracePeriod | None
    predicted: MemoryCount | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def resume_policy(self) -> ResumePolicy:
        """What the run may continue from."""
        resume, family = self.config.resume, self.checked.family
        return ResumePolicy(
            source=resume.source,
            allow=resume.allow,
            folder=self.folder,
            store=self.store,
            earlier_shifts=shifts_by_size(self.config, family, family.earlier_shift),
        )

    def fingerprint(self, shift: Callable[[Sequence[int]], float]) -> RunFingerprint:
        """What settings and weights decide of the run's numbers.

        Args:
            shift: of the noise levels, by the shape of one sample's latents.

        Raises:
            UserError: the samples of a step may be of several experts, or take several passes, where they
                must be of one, and take one.
        """
        config, family = self.config, self.checked.family
        shifts = shifts_by_size(config, family, shift)
        require_same_expert(config, family, shifts.values())
        require_as_many_passes(config, family)
        return settings_fingerprint(
            config,
            model_fingerprint=family.fingerprint(),
            training_adapter=self.checked.training_adapter,
            shifts=shifts,
        )

    @property
    def config(self) -> Config:
        """The settings."""
        return self.loaded.config

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes."""
        return bool(self.accelerator.is_main_process)


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Scope in which torch takes kernels that sum in the same order each time.

    Flash and memory-efficient attention then sum in order in the backward pass, and cuDNN's attention is left
    out. On the CPU nothing changes that this package computes.

    cuBLAS is repeatable where ``CUBLAS_WORKSPACE_CONFIG`` was ``:4096:8`` or ``:16:8`` when it was first
    used; torch raises where it was not.

    Raises:
        UserError: something has no such kernel on this device.
    """
    empty_memory: Any = torch.utils.deterministic
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    filled = empty_memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # It exposes reads of memory that nobody wrote by writing all of it, and offloaded blocks are gigabytes.
    empty_memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        what, found, _ = str(error).partition(_NONE_THERE)
        if not found:
            raise
        raise UserError(
            f"train.deterministic: true, but torch {torch.__version__} has no repeatable kernel for what "
            f"this model needs on this device: {what.strip()}. Set it to false"
        ) from error
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        empty_memory.fill_uninitialized_memory = filled
