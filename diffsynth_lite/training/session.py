"""This file opens a run: its processes, checks and folder, and the status and report of how it ended."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration
from rich.console import Console

from diffsynth_lite.config import Config, LoadedConfig
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import write_text
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.progress_log import Phase, watched
from diffsynth_lite.report.page import ReportWriter
from diffsynth_lite.run_folder.command import StartCommand
from diffsynth_lite.run_folder.folder import RunFolder, outcome_recorded, preparation_recorded
from diffsynth_lite.run_folder.loras import chosen_copy
from diffsynth_lite.run_folder.metrics import MetricsLog
from diffsynth_lite.run_folder.progress import RunningStatus, StepReport
from diffsynth_lite.training.checkpoint.comfyui_copies import require_copy_folder
from diffsynth_lite.training.checkpoint.manifest import Checkpoint
from diffsynth_lite.training.checkpoint.resume import (
    Lineage,
    ResumePolicy,
    RunFingerprint,
    settings_fingerprint,
)
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.checks import (
    CheckedRun,
    check_attention,
    check_before_download,
    download_model,
    with_placeholders,
)
from diffsynth_lite.training.data_settings import shifts_by_size
from diffsynth_lite.training.distributed.agreement import on_main_process
from diffsynth_lite.training.distributed.context import check_context, context_of
from diffsynth_lite.training.distributed.devices import count_nodes
from diffsynth_lite.training.distributed.sharding import (
    check_sharding,
    require_as_many_passes,
    require_same_expert,
    shards_of,
)
from diffsynth_lite.training.distributed.watchdog import LONG_WAIT
from diffsynth_lite.training.shortages import shortages_explained
from diffsynth_lite.training.stopping import GracePeriod, Requests, StopRequest, remove_old_requests

logger = logging.getLogger(__name__)

_SUPPORTED_DISTRIBUTION = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
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

    @property
    def seconds(self) -> float:
        """Since the program was started."""
        return time.perf_counter() - self._started_at

    @property
    def began_at(self) -> datetime:
        """When the program was started."""
        return datetime.now(UTC) - timedelta(seconds=self.seconds)

    def describe(self) -> str:
        """All stages so far as one line, and what lies between them."""
        total = self.seconds
        stages = {**self._stages, "other": total - sum(self._stages.values())}
        return (
            f"{total:.1f} s (" + ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items()) + ")"
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The objects that every stage of a run needs: settings, processes, folders.

    Attributes:
        checked: the base model and the data, as far as they are known before weights load.
        page: the report, which is refreshed as the run continues.
        console: where the progress line goes.
        grace: how long the launcher waits for a run that it stops; None where that is not known.
        requests: of signals and files, to stop, to save and to generate previews.
        status: while the run goes on; only the main process writes it.
        arguments: of ``train``, which started the run.
        num_nodes: that its processes are on.
        predicted_bytes: estimated memory of a step on the device; None where ``memory`` left nothing open.
        chosen: what ``memory.auto`` chose and the run keeps when it resumes, by dotted key.
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
    requests: Requests
    status: RunningStatus
    arguments: Sequence[str]
    num_nodes: int = 1
    predicted_bytes: int | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        """The settings."""
        return self.loaded.config

    @property
    def family(self) -> ModelFamily:
        """The model family, bound to the folder of the base model."""
        return self.checked.family

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes."""
        return bool(self.accelerator.is_main_process)

    @property
    def resume_policy(self) -> ResumePolicy:
        """The checkpoints and settings that the run may continue from."""
        resume = self.config.resume
        return ResumePolicy(
            source=resume.source,
            allow=resume.allow,
            folder=self.folder,
            store=self.store,
            earlier_shifts=shifts_by_size(self.config, self.family, self.family.earlier_shift),
        )

    def fingerprint(self, shift: Callable[[Sequence[int]], float]) -> RunFingerprint:
        """The fingerprint of the run's settings and weights.

        Args:
            shift: of the noise levels, by the shape of one sample's latents.
        """
        shifts = shifts_by_size(self.config, self.family, shift)
        require_same_expert(self.config, self.family, shifts.values())
        require_as_many_passes(self.config, self.family)
        return settings_fingerprint(
            self.config,
            model_fingerprint=self.family.fingerprint(),
            training_adapter=self.checked.training_adapter,
            shifts=shifts,
        )

    @shortages_explained()  # here, so that all processes end alike
    def write_settings(self) -> None:
        """Write the config and how the run was started, so that whoever finds the folder can resume it."""
        folder, loaded = self.folder, self.loaded
        command = StartCommand.of(self.arguments, self.accelerator.num_processes, self.num_nodes)
        # The first one: a new folder that a kill leaves without a status is known by it.
        texts = {folder.command_file: command.as_text(), folder.resolved_file: loaded.resolved_yaml}
        is_from_here = loaded.path.resolve() == folder.resolved_file.resolve()
        if not (is_from_here and folder.config_file.exists()):  # which has comments
            texts[folder.config_file] = loaded.source_text
        for path, text in texts.items():
            if not path.exists() or path.read_bytes() != text.encode():
                write_text(path, text)

    def write_first_settings(self) -> None:
        """Write them into a new folder, before there is anything else in it."""
        if self.folder.is_new():
            self.write_settings()

    @contextmanager
    def recorded(self, start_step: int) -> Iterator[list[str]]:
        """Scope of the work, with the run's kernels: afterwards status and report state how it ended.

        Remarks that are put into the list are part of the message of a run that finished.
        """
        total_steps = self.config.train.steps
        outcome = outcome_recorded(
            self.folder, self._saved_step, start_step=start_step, total_steps=total_steps
        )
        self.status.step = start_step
        kernels = deterministic_kernels() if self.config.train.deterministic else nullcontext()
        # Errors are explained here, too, so that the status has the message of the screen.
        with self.page.concluded(), ExitStack() as held, shortages_explained(self.folder.path), kernels:
            remarks = on_main_process(self.accelerator, held.enter_context, outcome)
            held.enter_context(watched(self._watch))
            try:
                yield [] if remarks is None else remarks
            finally:
                self.accelerator.free_memory()
                for tracker in self.accelerator.trackers:
                    tracker.finish()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Scope of what comes before it is known whether the run may begin, such as a download."""
        self.status.step = self._saved_step()
        with ExitStack() as held:
            scope = preparation_recorded(self.folder, self._saved_step)
            on_main_process(self.accelerator, held.enter_context, scope)
            held.enter_context(watched(self._watch))
            yield

    def _saved_step(self) -> int:
        return max(self.store.steps(), default=0)

    def begin_steps(self) -> None:
        """Let requests to stop wait for the end of a step from now on; call it on all processes."""
        self.requests.let_steps_begin()
        self.requests.note_save()
        if self.is_main:
            self.status.end_phase()
        logger.info("Start-up took %s.", self.clock.describe())

    def step_report(self, metrics: MetricsLog, start_step: int) -> StepReport:
        """What shows each step."""
        return StepReport(
            self.status if self.is_main else None,
            metrics,
            device=self.accelerator.device,
            start_step=start_step,
            total_steps=self.config.train.steps,
            every_steps=self.config.logging.every_steps,
        )

    def _watch(self, phase: Phase, done: int, total: int) -> None:
        """Show what the run does that takes long, and end that where the run is to stop."""
        if self.is_main:
            self.status.show_phase(phase, done, total)
        self.requests.watch(phase)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts or resumes.

    Attributes:
        checkpoint: None in a new run.
        fingerprint: settings and weights that decide the run's numbers, then also the data.
        run_id: kept over resumes.
        lineage: the starts up to this one, with what changed; empty until the data are known.
        is_finished: whether the run has ended and no step is left.
    """

    checkpoint: Checkpoint | None
    fingerprint: RunFingerprint
    run_id: str
    lineage: Lineage = field(default_factory=list)
    is_finished: bool = False

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return 0 if self.checkpoint is None else self.checkpoint.step


@contextmanager
def open_run(
    loaded: LoadedConfig,
    *,
    console: Console,
    clock: StartupClock,
    grace: GracePeriod | None = None,
    command: str | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[Run]:
    """Scope of a run that is checked, holds the lock of its folder, and hears stop signals.

    Args:
        command: that started the run, where that is known.
        arguments: of ``train``, to be kept in the run folder.

    Raises:
        UserError: something the user can fix; before weights load wherever that is possible.
        RunStoppedError: the run had to stop.
        RunInterrupted: a signal stopped the run, after saving.
    """
    config, output = loaded.config, loaded.config.output
    if config.train.cpu_threads is not None:
        torch.set_num_threads(config.train.cpu_threads)
    folder = RunFolder(Path(output.dir).expanduser())
    with clock.stage("checks"), shortages_explained():
        accelerator = build_accelerator(config, folder.path / "trackers")
        check_sharding(config, accelerator)
        check_context(config, accelerator)
        checked = check_before_download(with_placeholders(config), accelerator)
        check_attention(config, checked.family, accelerator.device)
        checked.family.shards = shards_of(config, checked.family, accelerator)
        checked.family.context = context_of(config, checked.family, accelerator)
    run = Run(
        loaded=loaded,
        accelerator=accelerator,
        folder=folder,
        store=CheckpointStore(
            folder.checkpoints_folder,
            keep=output.keep_checkpoints,
            keep_every=output.keep_every_steps,
            keep_loras=None if output.keep_adapters == "all" else output.keep_adapters,
            chosen=partial(chosen_copy, folder),
        ),
        checked=checked,
        page=ReportWriter(folder.path, is_main=accelerator.is_main_process),
        console=console,
        clock=clock,
        grace=grace,
        requests=Requests(
            folder,
            StopRequest(command),
            accelerator,
            output.checkpoint_every_minutes,
            max_hours=config.train.max_hours,
            seconds_gone=clock.seconds,
        ),
        status=RunningStatus(folder),
        arguments=arguments,
        num_nodes=count_nodes(accelerator),
    )
    with ExitStack() as held, run.requests.signals.listening(), shortages_explained(folder.path):
        on_main_process(accelerator, held.enter_context, folder.lock())
        on_main_process(accelerator, remove_old_requests, folder.path)
        on_main_process(accelerator, run.write_first_settings)
        with clock.stage("checks"), run.prepared():
            on_main_process(accelerator, require_copy_folder, config)
            download_model(checked, accelerator)
        yield run


def build_accelerator(config: Config, tracker_folder: Path) -> Accelerator:
    """Accelerate's view of the machine: device, processes, mixed precision, trackers."""
    accelerator = Accelerator(
        mixed_precision=config.train.mixed_precision,
        log_with=list(config.logging.trackers) or None,
        project_config=ProjectConfiguration(project_dir=str(tracker_folder), logging_dir=str(tracker_folder)),
        # Otherwise a launcher's variable would scale every gradient; the loop accumulates by itself.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=LONG_WAIT)],
    )
    if accelerator.distributed_type not in _SUPPORTED_DISTRIBUTION:
        raise UserError(
            f"accelerate launch: {accelerator.distributed_type.value} is not supported; use one device, or "
            "several with plain data parallelism (accelerate launch --multi_gpu, or torchrun), and set "
            "memory.shard_base: all where they are to share the model"
        )
    return accelerator


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
