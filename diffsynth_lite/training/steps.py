"""This file trains a run that is built: its steps, and what follows each of them."""

import logging
from collections.abc import Callable
from datetime import timedelta

from diffsynth_lite.core.gradient import gradient_engine
from diffsynth_lite.training.actions import Evaluate, LogMetrics
from diffsynth_lite.training.builder import BuiltRun
from diffsynth_lite.training.checkpoint.saver import Saver
from diffsynth_lite.training.grace import StopTime
from diffsynth_lite.training.loop import run_loop
from diffsynth_lite.training.memory_builder import build_engine, build_engine_report
from diffsynth_lite.training.optimizer_step import StepResult
from diffsynth_lite.training.patience import Patience
from diffsynth_lite.training.requests import Requests, every
from diffsynth_lite.training.run_folder.metrics import MetricsFile, MetricsLog
from diffsynth_lite.training.run_folder.progress import Pace, ProgressLine
from diffsynth_lite.training.run_folder.status import LiveStatus
from diffsynth_lite.training.run_setting import RunSetting
from diffsynth_lite.training.signals import StopRequest

logger = logging.getLogger(__name__)


def train_steps(
    setting: RunSetting, built: BuiltRun, saver: Saver, stop: StopRequest, start_step: int
) -> int:
    """Train, and save where it stops.

    Args:
        setting: of the run.
        built: what takes its steps, and what it is measured by.
        saver: writes its checkpoints and LoRAs.
        stop: is asked after each step.
        start_step: optimizer steps done before.

    Returns:
        Optimizer steps done.
    """
    config, accelerator = setting.config, setting.accelerator
    train = config.train
    metrics = MetricsLog(MetricsFile(setting.folder.metrics_file), accelerator)
    stop_time = StopTime(setting.grace if setting.is_main else None, save_bytes=saver.num_bytes)
    evaluate = stop_time.of_evaluations(_build_evaluate(setting, built, saver, metrics).at)
    patience = Patience(accelerator, timedelta(minutes=train.step_timeout_minutes))
    requests = Requests(
        folder=setting.folder.path,
        signals=stop,
        accelerator=accelerator,
        save=patience.unhurried(stop_time.of_saves(saver.save)),
        sample=patience.unhurried(evaluate),
        saves_at=every(config.output.checkpoint_every_steps, last_step=train.steps),
        samples_at=every(config.validation.every_steps, last_step=train.steps),
        save_every_minutes=config.output.checkpoint_every_minutes,
    )
    pace = Pace(total_steps=train.steps)
    every_steps, device = config.logging.every_steps, accelerator.device
    progress = ProgressLine(
        pace, start_step=start_step, total_steps=train.steps, every_steps=every_steps, device=device
    )
    saver.repair_best()
    engine = build_engine(config)
    log_metrics = LogMetrics(metrics=metrics, pace=pace, device=device, every_steps=every_steps)
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
                *_told(setting, pace),
                log_metrics.after_step,
                stop_time.after_step,
                requests.after_step,
                lambda _result: patience.renew(),
            ),
            should_stop=lambda: requests.stop,
        )
    if step < train.steps or start_step == step:
        saver.save(step)
    return step


def _build_evaluate(setting: RunSetting, built: BuiltRun, saver: Saver, metrics: MetricsLog) -> Evaluate:
    return Evaluate(
        transformer=built.transformer,
        averaged=saver.averaged if saver.measures_average else None,
        validation_loss=built.validation_loss,
        previews=built.previews,
        metrics=metrics,
        consider=saver.consider,
        accelerator=setting.accelerator,
    )


def _told(setting: RunSetting, pace: Pace) -> list[Callable[[StepResult], None]]:
    """What tells a step to those who watch the run folder: the main process alone."""
    if not setting.is_main:
        return []
    total_steps = setting.config.train.steps
    return [LiveStatus(folder=setting.folder, pace=pace, total_steps=total_steps).after_step]
