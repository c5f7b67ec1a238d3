"""This file runs a training from a loaded config to the exported LoRA."""

import logging
import uuid
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers.training_utils import free_memory
from rich.console import Console

from diffsynth_lite.config import Config, LoadedConfig
from diffsynth_lite.core.gradient import gradient_engine
from diffsynth_lite.errors import RunInterrupted
from diffsynth_lite.training.actions import Evaluate, LogMetrics, every
from diffsynth_lite.training.builder import (
    BuiltRun,
    build_accelerator,
    build_average,
    build_optimizer,
    build_run,
    build_transformer,
    lora_alpha,
)
from diffsynth_lite.training.caching import encode_run
from diffsynth_lite.training.checkpoints import Checkpoint, CheckpointStore
from diffsynth_lite.training.contract import Contract, data_contract, settings_contract
from diffsynth_lite.training.grace import StopGrace, StopTime
from diffsynth_lite.training.initial_lora import read_initial_lora
from diffsynth_lite.training.lineage import extended_lineage
from diffsynth_lite.training.loop import run_loop
from diffsynth_lite.training.memory_advice import out_of_memory_explained
from diffsynth_lite.training.memory_builder import build_engine, build_engine_report, build_workload
from diffsynth_lite.training.metrics import MetricsFile
from diffsynth_lite.training.opening import follow_run, write_opening
from diffsynth_lite.training.outcome import outcome_recorded, shortages_explained
from diffsynth_lite.training.patience import Patience
from diffsynth_lite.training.preflight import CheckedRun, check_run
from diffsynth_lite.training.processes import on_main_process
from diffsynth_lite.training.progress import Pace, ProgressLine
from diffsynth_lite.training.repeatable_kernels import repeatable_kernels
from diffsynth_lite.training.requests import Requests, remove_old_requests
from diffsynth_lite.training.resume import Origin, agreed_start
from diffsynth_lite.training.run_folder import RunFolder
from diffsynth_lite.training.saving import Saver, restore
from diffsynth_lite.training.signals import StopRequest
from diffsynth_lite.training.startup import StartupClock
from diffsynth_lite.training.trackers import MetricsLog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """What every stage of a run needs: settings, processes, places."""

    loaded: LoadedConfig
    accelerator: Accelerator
    folder: RunFolder
    store: CheckpointStore
    checked: CheckedRun
    console: Console
    clock: StartupClock
    grace: StopGrace | None

    @property
    def origin(self) -> Origin:
        """Where the run comes from."""
        resume = self.config.resume
        return Origin(source=resume.source, allow=resume.allow, folder=self.folder, store=self.store)

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)


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
    setting = _Setting(
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
    kernels = repeatable_kernels() if config.train.deterministic else nullcontext()
    with ExitStack() as held, stop.listening(), kernels:
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
        with recorded if setting.is_main else nullcontext(), shortages_explained():
            _conclude(setting, _train(setting, contract, checkpoint, stop))


def _train(setting: _Setting, contract: Contract, checkpoint: Checkpoint | None, stop: StopRequest) -> int:
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
        measures_average=averaged is not None and setting.config.validation.use_ema,
        best=checkpoint.documents["state"].get("best") if checkpoint else None,
    )
    try:
        workload = build_workload(setting.config, setting.checked, encoded)
        with out_of_memory_explained(workload, transformer, optimizer):
            step = _loop(setting, built, saver, stop, start_step)
    finally:
        # The wrapped model goes before its process group: as the group's last owner it deadlocked in torch's
        # destructor, in 1 of 7 runs on two gloo processes.
        del built
        setting.accelerator.free_memory()
        setting.accelerator.end_training()
    return step


def _conclude(setting: _Setting, step: int) -> None:
    steps = setting.config.train.steps
    if step < steps:
        raise RunInterrupted(f"stopped after step {step} of {steps}, saved; the same command continues it")
    logger.info("Finished after %d steps. %s", step, _results(setting.folder))


def _loop(setting: _Setting, built: BuiltRun, saver: Saver, stop: StopRequest, start_step: int) -> int:
    """Train, and save where it stops; returns the optimizer steps done."""
    config, accelerator = setting.config, setting.accelerator
    train = config.train
    metrics = MetricsLog(MetricsFile(setting.folder.metrics_file), accelerator)
    stop_time = StopTime(setting.grace if setting.is_main else None, save_bytes=saver.num_bytes)
    evaluate = stop_time.of_previews(_build_evaluate(setting, built, saver, metrics).at)
    patience = Patience(accelerator, timedelta(minutes=train.step_timeout_minutes))
    save, sample = patience.unhurried(stop_time.of_saves(saver.save)), patience.unhurried(evaluate)
    requests = Requests(
        folder=setting.folder.path,
        signals=stop,
        accelerator=accelerator,
        save=save,
        sample=sample,
        save_every_minutes=config.output.checkpoint_every_minutes,
    )
    pace = Pace(total_steps=train.steps)
    progress = ProgressLine(
        pace,
        start_step=start_step,
        total_steps=train.steps,
        every_steps=config.logging.every_steps,
        device=accelerator.device,
    )
    engine = build_engine(config)
    log_metrics = LogMetrics(
        metrics=metrics, pace=pace, device=accelerator.device, every_steps=config.logging.every_steps
    )
    if start_step == 0:
        with setting.clock.stage("first previews"):
            evaluate(0)
    logger.info("Start-up took %s.", setting.clock.describe())
    stop.let_steps_finish()
    live = setting.is_main and setting.console.is_terminal
    with gradient_engine(engine), patience.with_steps(), progress.shown(setting.console, live=live):
        step = run_loop(
            built.step.take,
            start_step=start_step,
            total_steps=train.steps,
            after_step=(
                build_engine_report(config, setting.checked, engine, metrics, accelerator).after_step,
                progress.update,
                log_metrics.after_step,
                stop_time.after_step,
                # First, so that a checkpoint knows whether it is the best.
                every(config.validation.every_steps, sample, last_step=train.steps),
                every(config.output.checkpoint_every_steps, save, last_step=train.steps),
                requests.after_step,
                lambda _result: patience.renew(),
            ),
            should_stop=lambda: requests.stop,
        )
    if step < train.steps or start_step == step:
        saver.save(step)
    return step


def _build_evaluate(setting: _Setting, built: BuiltRun, saver: Saver, metrics: MetricsLog) -> Evaluate:
    return Evaluate(
        transformer=built.transformer,
        averaged=saver.averaged if saver.measures_average else None,
        validation_loss=built.validation_loss,
        previews=built.previews,
        metrics=metrics,
        consider=saver.consider,
        accelerator=setting.accelerator,
    )


def _initial_lora(setting: _Setting) -> dict[str, torch.Tensor] | None:
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
