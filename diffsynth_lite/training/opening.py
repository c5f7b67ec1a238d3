"""This file opens a run: what its folder holds from a start on, and the trackers that follow it."""

from pathlib import Path

import yaml
from accelerate import Accelerator

from diffsynth_lite.config import LoadedConfig
from diffsynth_lite.training.checkpoint.resume import Contract, Lineage
from diffsynth_lite.training.checkpoint.store import CheckpointStore
from diffsynth_lite.training.files import write_json_atomic, write_text_atomic
from diffsynth_lite.training.run_folder.folder import RunFolder
from diffsynth_lite.training.run_folder.metrics import MetricsFile, start_trackers


def write_opening(
    folder: RunFolder, store: CheckpointStore, loaded: LoadedConfig, contract: Contract, lineage: Lineage
) -> None:
    """Write contract, lineage and config, and cut metrics and checkpoints back to the step of this start.

    Args:
        folder: of the run.
        store: of its checkpoints.
        loaded: the config and its texts.
        contract: what makes the run this run.
        lineage: its starts; the last one is this.
    """
    start_step = lineage[-1]["step"]
    write_json_atomic(folder.contract_file, contract)
    write_json_atomic(folder.lineage_file, lineage)
    write_text_atomic(folder.config_file, loaded.source_text)
    write_text_atomic(folder.resolved_file, loaded.resolved_yaml)
    # A new start also drops what an earlier one logged before its first checkpoint.
    MetricsFile(folder.metrics_file).cut_back_to(start_step or -1)
    store.cut_back_to(start_step)


def follow_run(loaded: LoadedConfig, accelerator: Accelerator, *, folder: Path, run_id: str) -> None:
    """Start the trackers that the config names.

    Args:
        loaded: the config; its settings are shown unresolved, so that no environment variable's value is.
        accelerator: was made with the trackers.
        folder: where offline files go.
        run_id: identifies the run across resumes.
    """
    settings = loaded.config.logging
    start_trackers(
        accelerator,
        names=settings.trackers,
        project=settings.project,
        settings=yaml.safe_load(loaded.resolved_yaml),
        folder=folder,
        run_name=settings.run_name,
        run_id=run_id,
        wandb_mode=settings.wandb_mode,
    )
