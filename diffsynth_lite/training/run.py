"""This file runs a training from a loaded config to the exported LoRA."""

import logging
import uuid
from contextlib import ExitStack, nullcontext
from pathlib import Path

import torch
from diffusers.training_utils import free_memory
from rich.console import Console

from diffsynth_lite.config import Config, LoadedConfig
from diffsynth_lite.errors import RunInterrupted
from diffsynth_lite.training.builder import (
    build_accelerator,
    build_average,
    build_optimizer,
    build_run,
    build_transformer,
    lora_alpha,
)
from diffsynth_lite.training.checkpoint.lora_file import read_initial_lora
from diffsynth_lite.training.checkpoint.resume import (
    Contract,
    agreed_start,
    data_contract,
    extended_lineage,
    settings_contract,
)
from diffsynth_lite.training.checkpoint.saver import Saver, restore
from diffsynth_lite.training.checkpoint.store import Checkpoint, CheckpointStore
from diffsynth_lite.training.encoding import TrainingData, encode_run
from diffsynth_lite.training.grace import StopGrace
from diffsynth_lite.training.memory_advice import out_of_memory_explained
from diffsynth_lite.training.memory_builder import build_workload
from diffsynth_lite.training.opening import follow_run, write_opening
from diffsynth_lite.training.preflight import check_run
from diffsynth_lite.training.processes import on_main_process
from diffsynth_lite.training.repeatable_kernels import repeatable_kernels
from diffsynth_lite.training.requests import remove_old_requests
from diffsynth_lite.training.run_folder.folder import RunFolder
from diffsynth_lite.training.run_folder.status import outcome_recorded, shortages_explained
from diffsynth_lite.training.run_setting import RunSetting
from diffsynth_lite.training.signals import StopRequest
from diffsynth_lite.training.startup import StartupClock
from diffsynth_lite.training.trainer import train
from diffsynth_lite.training.yardstick import Yardstick

logger = logging.getLogger(__name__)


def run_training(
    loaded: LoadedConfig, *, console: Console, clock: StartupClock, grace: StopGrace | None = None
) -> None:
    """Train a LoRA: check, encode, load, train, save.

    Args:
        loaded: the config and its texts.
        console: where the progress line goes.
        clock: counts the start-up time.
        grace: that the launcher gives a stopped run, where it is known.

    Raises:
        UserError: something the user can fix; before weights load wherever that is possible.
        RunStoppedError: the run had to stop.
        RunInterrupted: a signal stopped the run, after saving.
    """
    config = loaded.config
    if config.train.cpu_threads is not None:
        torch.set_num_threads(config.train.cpu_threads)
    folder = RunFolder(Path(config.output.dir).expanduser())
    accelerator = build_accelerator(config, folder.path / "trackers")
    with clock.stage("checks"):
        checked = check_run(config, accelerator)
    setting = RunSetting(
        loaded=loaded,
        accelerator=accelerator,
        folder=folder,
        store=CheckpointStore(
            folder.checkpoints_folder,
            keep=config.output.keep_checkpoints,
            keep_every=config.output.keep_every_steps,
        ),
        checked=checked,
        console=console,
        clock=clock,
        grace=grace,
    )
    stop = StopRequest()
    with ExitStack() as held, stop.listening():
        on_main_process(accelerator, lambda: held.enter_context(folder.lock()))
        on_main_process(accelerator, lambda: remove_old_requests(folder.path))
        contract = settings_contract(config, model_fingerprint=checked.family.fingerprint())
        checkpoint = agreed_start(accelerator, setting.origin, contract)
        status = folder.read_status() or {}
        if checkpoint and checkpoint.step >= config.train.steps and status.get("state") == "finished":
            logger.info("This run is finished (step %d). %s", checkpoint.step, _results(folder))
            return
        start_step = checkpoint.step if checkpoint else 0
        recorded = outcome_recorded(
            folder, setting.store, start_step=start_step, total_steps=config.train.steps
        )
        kernels = repeatable_kernels() if config.train.deterministic else nullcontext()
        with recorded if setting.is_main else nullcontext(), shortages_explained(), kernels:
            _conclude(setting, _train(setting, contract, checkpoint, stop))


def _train(setting: RunSetting, contract: Contract, checkpoint: Checkpoint | None, stop: StopRequest) -> int:
    """Encode, load, train, save; returns the optimizer steps done."""
    start_step = checkpoint.step if checkpoint else 0
    initial = _initial_lora(setting) if checkpoint is None else None
    with setting.clock.stage("encoding"):
        encoded = encode_run(setting.config, setting.checked, setting.accelerator)
        # From here on only tensors are needed.
        setting.checked.drop_records()
        free_memory()
    contract |= data_contract(encoded.identity, micro_batch_size=setting.config.train.micro_batch_size)
    changes = setting.origin.changes(contract, checkpoint)
    lineage = extended_lineage(checkpoint, changes, setting.accelerator)
    run_id = checkpoint.documents["state"]["run_id"] if checkpoint else uuid.uuid4().hex[:12]
    if setting.is_main:
        write_opening(setting.folder, setting.store, setting.loaded, contract, lineage)
    follow_run(setting.loaded, setting.accelerator, folder=setting.folder.path / "trackers", run_id=run_id)
    with setting.clock.stage("model"):
        logger.info("Loading the transformer.")
        transformer = build_transformer(setting.config, setting.checked, setting.accelerator.device, initial)
        optimizer = build_optimizer(setting.config, transformer)
        averaged = build_average(setting.config, transformer)
        if checkpoint is not None:
            restore(checkpoint, transformer, optimizer, averaged)
        built = build_run(
            setting.config,
            setting.checked,
            encoded,
            accelerator=setting.accelerator,
            transformer=transformer,
            optimizer=optimizer,
            averaged=averaged,
            start_step=start_step,
            preview_folder=setting.folder.previews_folder,
        )
    saver = Saver(
        folder=setting.folder,
        store=setting.store,
        family=setting.checked.family,
        transformer=transformer,
        optimizer=optimizer,
        averaged=averaged,
        accelerator=setting.accelerator,
        contract=contract,
        run_id=run_id,
        lineage=lineage,
        resolved_yaml=setting.loaded.resolved_yaml,
        keeps_best=setting.config.output.keep_best and setting.config.validation.data is not None,
        yardstick=_yardstick(setting.config, encoded),
        best=checkpoint.documents["state"].get("best") if checkpoint else None,
    )
    try:
        workload = build_workload(setting.config, setting.checked, encoded)
        with out_of_memory_explained(workload, transformer, optimizer):
            step = train(setting, built, saver, stop, start_step)
    finally:
        # The wrapped model goes before its process group: as the group's last owner it deadlocked in torch's
        # destructor, in 1 of 7 runs on two gloo processes.
        del built
        setting.accelerator.free_memory()
        setting.accelerator.end_training()
    return step


def _yardstick(config: Config, encoded: TrainingData) -> Yardstick:
    return Yardstick(
        data=encoded.validation_identity,
        num_items=len(encoded.validation_items),
        seed=config.validation.seed,
        is_average=config.train.ema_decay is not None and config.validation.use_ema,
    )


def _conclude(setting: RunSetting, step: int) -> None:
    steps = setting.config.train.steps
    if step < steps:
        raise RunInterrupted(f"stopped after step {step} of {steps}, saved; the same command continues it")
    logger.info("Finished after %d steps. %s", step, _results(setting.folder))


def _initial_lora(setting: RunSetting) -> dict[str, torch.Tensor] | None:
    lora = setting.config.lora
    if lora.init_from is None:
        return None
    return read_initial_lora(
        setting.checked.family,
        lora.init_from,
        layers=setting.checked.target_layers,
        rank=lora.rank,
        alpha=lora_alpha(setting.config),
    )


def _results(folder: RunFolder) -> str:
    return f"LoRA: {folder.lora_folder}; previews: {folder.previews_folder}; metrics: {folder.metrics_file}"
