"""This file finds from where a run starts or resumes, and begins its folder there."""

import logging
import uuid
from dataclasses import replace
from functools import partial

import torch

from diffsynth_lite.config import load_yaml
from diffsynth_lite.files import write_json, write_text
from diffsynth_lite.run_folder.metrics import MetricsFile, read_items, start_trackers
from diffsynth_lite.run_folder.progress import is_logged
from diffsynth_lite.training.builder import build_noise_levels
from diffsynth_lite.training.checkpoint.resume import data_fingerprint, extended_lineage, resolve_checkpoint
from diffsynth_lite.training.distributed.agreement import (
    from_main_process,
    on_main_process,
    tensors_from_main_process,
)
from diffsynth_lite.training.encoding.run_encoding import TrainingData
from diffsynth_lite.training.layer_groups import adapter_kind, own_sizes, usual_size
from diffsynth_lite.training.lora_file import read_initial_lora
from diffsynth_lite.training.session import Run, Start
from diffsynth_lite.training.shortages import shortages_explained

logger = logging.getLogger(__name__)


def find_start(run: Run) -> Start:
    """The checkpoint that the run resumes, or a new start; the same on all processes.

    Raises:
        DifferentRunError: the folder holds a run with other settings.
    """
    fingerprint = run.fingerprint(build_noise_levels(run.config, run.family).shift)
    checkpoint = resolve_checkpoint(run.accelerator, run.resume_policy, fingerprint)
    is_finished = from_main_process(run.accelerator, lambda: _is_finished(run))
    run_id = checkpoint.documents["state"]["run_id"] if checkpoint else uuid.uuid4().hex[:12]
    start = Start(checkpoint=checkpoint, fingerprint=fingerprint, run_id=run_id)
    return replace(start, is_finished=is_finished and start.step >= run.config.train.steps)


def _is_finished(run: Run) -> bool:
    """Whether the run's status says that it is finished."""
    status = run.folder.read_status()
    if run.folder.has_lost_status():
        logger.warning(
            "%s is missing or damaged; the checkpoints say how far the run is.", run.folder.status_file
        )
    return status is not None and status.get("state") == "finished"


def initial_lora(run: Run, start: Start) -> dict[str, torch.Tensor] | None:
    """The values that the adapter of a new run starts from; None where they are drawn, or restored."""
    location = run.config.lora.init_from
    if location is None or start.checkpoint is not None:
        return None
    size = usual_size(run.config)
    read = partial(
        read_initial_lora,
        run.family,
        location,
        layers=run.checked.target_layers,
        rank=size.rank,
        alpha=size.alpha,
        own=own_sizes(run.checked.groups),
        kind=adapter_kind(run.config),
    )
    return tensors_from_main_process(run.accelerator, read)


def begin_run_folder(run: Run, start: Start, data: TrainingData) -> Start:
    """Add what the data decide to the start, cut the folder back to its step, and start the trackers.

    Raises:
        DifferentRunError: the run was started with other data.
    """
    accelerator, policy = run.accelerator, run.resume_policy
    batch_size = run.config.train.micro_batch_size
    fingerprint = start.fingerprint | data_fingerprint(data.identity, micro_batch_size=batch_size)
    changes = from_main_process(accelerator, lambda: policy.changed_settings(fingerprint, start.checkpoint))
    earlier = from_main_process(accelerator, lambda: policy.earlier_starts(start.checkpoint))
    lineage = extended_lineage(earlier, start.checkpoint, changes, accelerator, chosen=run.chosen)
    start = replace(start, fingerprint=fingerprint, lineage=lineage)
    on_main_process(accelerator, lambda: _write_start(run, start))
    on_main_process(accelerator, lambda: _start_trackers(run, start.run_id))
    return start


@shortages_explained()  # here, so that all processes end alike
def _write_start(run: Run, start: Start) -> None:
    """Write fingerprint, lineage and config, and cut metrics and checkpoints back to this start's step."""
    folder = run.folder
    write_json(folder.fingerprint_file, start.fingerprint)
    write_json(folder.lineage_file, start.lineage)
    write_text(folder.config_file, run.loaded.source_text)
    write_text(folder.resolved_file, run.loaded.resolved_yaml)
    read_items(folder.items_file)  # Warns of what is damaged before the run continues.
    # A new start also drops what an earlier one logged before its first checkpoint.
    for file in folder.row_files:
        MetricsFile(file).cut_back_to(start.step or -1)
    run.store.cut_back_to(start.step)
    _warn_of_lost_rows(run, start)


def _warn_of_lost_rows(run: Run, start: Start) -> None:
    """Warn where the metrics lack the last row that was logged before the checkpoint of this run folder."""
    checkpoint = start.checkpoint
    if checkpoint is None or checkpoint.path.parent != run.store.folder:
        return
    every_steps = load_yaml(checkpoint.documents["config"])["logging"]["every_steps"]
    if not isinstance(every_steps, int):
        return  # ${...}, whose value is kept nowhere
    # Only of the start that wrote it: the interval may have been another one before.
    starts = checkpoint.lineage
    own_steps = range(checkpoint.step, starts[-1]["step"] if starts else checkpoint.step, -1)
    last = next((step for step in own_steps if is_logged(step, every_steps)), None)
    if last is not None:
        MetricsFile(run.folder.metrics_file).warn_of_lost_rows(last)


def _start_trackers(run: Run, run_id: str) -> None:
    settings = run.config.logging
    start_trackers(
        run.accelerator,
        names=settings.trackers,
        project=settings.project,
        # Unresolved: no tracker gets the value of an environment variable.
        settings=load_yaml(run.loaded.resolved_yaml),
        folder=run.folder.path / "trackers",
        run_name=settings.run_name,
        run_id=run_id,
        wandb_mode=settings.wandb_mode,
    )
