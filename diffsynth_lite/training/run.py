"""This file is the life of a run, from a loaded config to the exported LoRA."""

import logging
from contextlib import AbstractContextManager

from diffsynth_lite.errors import ON_EACH_MACHINE, RunInterrupted
from diffsynth_lite.run_folder.folder import RunFolder
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.distributed.agreement import on_main_process
from diffsynth_lite.training.saver import Saver
from diffsynth_lite.training.session import Run
from diffsynth_lite.training.stages import (
    begin_run_folder,
    build,
    compiled_code_kept,
    encode,
    find_start,
    generate_data,
    initial_lora,
    memory_explained,
    stopped_compiler_explained,
    with_chosen_memory,
)
from diffsynth_lite.training.trainer import train

logger = logging.getLogger(__name__)


def run_training(opened: AbstractContextManager[Run]) -> None:
    """Train a LoRA to the exported file, in a run of ``open_run``, which names the errors, too."""
    with opened as run:
        run = with_chosen_memory(run)
        start = find_start(run)
        if start.is_finished:
            run.page.restore()
            _log_results(run.folder, f"This run is finished (step {start.step})")
            return
        with run.recorded(start.step) as remarks:
            initial = initial_lora(run, start)
            data = encode(run, start)
            start = begin_run_folder(run, start, data)
            built = build(run, start, data, initial)
            saver = Saver(run, start, data, built)
            explained = stopped_compiler_explained(run)
            with memory_explained(run, data, built), explained, compiled_code_kept(run):
                generate_data(run, data, built)
                step = train(run, built, saver, start.step)
            _conclude(run, built, step, remarks)


def _conclude(run: Run, built: TrainingObjects, step: int, remarks: list[str]) -> None:
    """Log where the results are, unless the run was stopped or ended with numbers that are not finite."""
    steps = run.config.train.steps
    on_main_process(run.accelerator, built.divergence.require_none, step, steps)
    if step < steps:
        how = run.requests.cause or f"the same command continues it{run.requests.signals.command}"
        raise RunInterrupted(f"stopped after step {step} of {steps}, saved; {how}")
    if skipped := built.divergence.num_skipped:
        remarks.append(f"skipped steps, as loss or gradients were not finite: {skipped}")
    _log_results(run.folder, "; ".join([f"Finished after {step} steps", *remarks]))


def _log_results(folder: RunFolder, message: str) -> None:
    """Log how the run ended, and where its results are."""
    places = f"Its folder is on the machine of the main process: {folder.path}"
    if folder.path.is_dir():
        previews = f"previews: {folder.previews_folder}; " if folder.previews_folder.is_dir() else ""
        places = f"Page: {folder.report_file}; LoRA: {folder.lora_folder}; "
        places += f"{previews}metrics: {folder.metrics_file}"
    logger.info("%s. %s", message, places, extra=ON_EACH_MACHINE)
