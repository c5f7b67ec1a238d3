"""The training loop: one optimizer step, and everything after it, in the order in which it happens.

``train`` is the life of a run after everything is built, ``train_step`` the arithmetic of one step. Neither
knows a model: the loss arrives as a function. Nor where batches come from: they are a function of only the
step, so that the step is all that a checkpoint has to remember of the data.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from math import isfinite
from typing import TypeVar

import torch

from diffsynth_lite.core.gradient import gradient_engine
from diffsynth_lite.core.noise.losses import mean_losses
from diffsynth_lite.data.batches import Batch, describe_sizes
from diffsynth_lite.run_folder.metrics import MetricsFile, MetricsLog
from diffsynth_lite.run_folder.progress import StepResult
from diffsynth_lite.training.builder import TrainingObjects, build_engine
from diffsynth_lite.training.distributed.agreement import from_main_process, on_all_processes, on_main_process
from diffsynth_lite.training.distributed.devices import mean_gradients
from diffsynth_lite.training.distributed.watchdog import Watchdog
from diffsynth_lite.training.evaluation import MeasuredLoss
from diffsynth_lite.training.memory_report import StepComparison, report_graphs, report_memory
from diffsynth_lite.training.optimization.optimizers import learned_rate
from diffsynth_lite.training.saver import Saver
from diffsynth_lite.training.session import Run
from diffsynth_lite.training.stopping import Asked, ShutdownBudget

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def train(run: Run, built: TrainingObjects, saver: Saver, start_step: int) -> int:
    """Train until the last step or until somebody asks to stop, and save there.

    Returns:
        Optimizer steps done.

    Raises:
        RunDivergedError: too many steps in a row, or weights that were to be saved, were not finite.
        RunStoppedError: the run folder was lost, or something that it is there for failed.
        UserError: a memory switch that is on had no effect.
    """
    config, requests, total_steps = run.config, run.requests, run.config.train.steps
    metrics = MetricsLog(MetricsFile(run.folder.metrics_file), run.accelerator)
    watchdog = Watchdog(run.accelerator, timedelta(minutes=config.train.step_timeout_minutes))
    shutdown = ShutdownBudget(run.grace if run.is_main else None, save_bytes=run.checked.saved.total)
    engine = build_engine(config, built.weights)
    comparison = StepComparison(run.predicted_bytes, built, metrics.log, start_step)
    report = run.step_report(metrics, start_step)

    def evaluate_now(step: int) -> Asked:
        with watchdog.paused():
            evaluate(built, saver, metrics, step, shutdown)
        requests.end_without_progress(saver.patience)
        return requests.gather()  # It may have taken long.

    def save_now(step: int) -> None:
        with watchdog.paused(), shutdown.timing("save"):
            measure_updates(built, step)
            built.sample_losses.write(step)
            saver.save(step)
        requests.note_save()

    saver.repair_loras()
    with run.clock.stage("first previews"):
        if start_step == 0:
            evaluate(built, saver, metrics, 0, shutdown)
        else:
            _make_up_previews(run, built, saver, start_step)
    requests.end_without_progress(saver.patience)  # as an earlier start has found
    run.begin_steps()
    built.weights.start_report()
    step = min(start_step, total_steps)  # train.steps may have been lowered since the checkpoint.
    with gradient_engine(engine), watchdog.watching(), report.shown(run.console):
        for step in range(start_step + 1, (start_step if requests.cause else total_steps) + 1):
            with comparison.watching(step):
                result = train_step(built, step)
            asked = requests.gather()  # Before rows are written: the run folder may have been lost.
            if step == start_step + 1:
                report_memory(run, built, engine, metrics, step)
            report.after_step(result, has_compiled=report_graphs(built.compiler, metrics, step))
            built.sample_losses.after_step(step)
            _require_few_skips(built, step)
            shutdown.after_step(result.seconds)
            # Evaluation first: the checkpoint records whether it is the best so far.
            if asked.evaluate or _is_due(step, config.validation.every_steps, total_steps):
                asked = asked.joined(evaluate_now(step))
            if asked.save or _is_due(step, config.output.checkpoint_every_steps, total_steps):
                save_now(step)
            watchdog.reset()
            if asked.stop:
                break
            run.page.refresh()
    # Stopped, or no step was left to take; a step that is saved already is not written again.
    if step < total_steps or step == start_step:
        built.sample_losses.write(step)
        saver.save(step)
    saver.log_rounding_error()
    return step


def train_step(built: TrainingObjects, step: int) -> StepResult:
    """Take one optimizer step: gradients of its micro-batches, clipped, change the weights.

    Where the loss or the norm of the gradients is not finite, the step is skipped: the weights and the
    optimizer stay as they were, while the data and the learning rate continue.

    Args:
        step: counted from 1.
    """
    started_at = time.perf_counter()
    accelerator, optimizer, timer = built.accelerator, built.optimizer, built.timer
    num_data_ranks = accelerator.num_processes // built.context_parallel
    timer.mark("between")
    micro_batches = next(built.batches)
    timer.mark("data")
    learning_rate = built.learning_rate(step - 1)
    group_rates = {name: rate(step - 1) for name, rate in built.group_rates.items()}
    rates = list(group_rates.values()) or [learning_rate] * len(optimizer.param_groups)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate

    local_loss = torch.zeros((), device=accelerator.device)
    for batch in micro_batches:
        for part in built.parts_of_loss(batch):
            loss = part / batch.num_parts(num_data_ranks)
            timer.mark("forward")
            accelerator.backward(loss)
            timer.mark("backward")
            local_loss += loss.detach()
    mean_gradients(built.trained_parameters, accelerator, context_parallel=built.context_parallel)
    mean_loss = accelerator.reduce(local_loss, reduction="mean")
    grad_norm = torch.nn.utils.clip_grad_norm_(built.trained_parameters, built.max_grad_norm)

    # One transfer for all, as each waits for the device. All are the same on all devices.
    by_kind = built.totals_by_kind()
    measured = [mean_loss[None], grad_norm[None], by_kind, built.totals_by_noise(step)]
    loss_value, norm_value, *rest = torch.cat(measured).tolist()
    losses = mean_losses(loss_value, rest[: len(by_kind)])
    if isfinite(loss_value) and isfinite(norm_value):
        optimizer.step()
        if built.averaged is not None:
            built.averaged.update()
        built.divergence.note_taken()
    else:
        _skip(built, step, loss_value, norm_value, micro_batches)
    optimizer.zero_grad()
    timer.mark("update")
    return StepResult(
        step=step,
        loss=losses.learned,
        preservation_loss=losses.preserved,
        video_loss=losses.video,
        audio_loss=losses.audio,
        positive_loss=losses.positive,
        negative_loss=losses.negative,
        grad_norm=norm_value,
        learning_rate=learning_rate,
        group_rates=group_rates,
        learned_rate=learned_rate(optimizer),
        num_samples=micro_batches[0].step_samples,
        sizes=describe_sizes(micro_batches),
        seconds=time.perf_counter() - started_at,
        parts=timer.seconds(),
        num_skipped=built.divergence.num_skipped,
        totals_by_noise=rest[len(by_kind) :],
    )


def evaluate(
    built: TrainingObjects, saver: Saver, metrics: MetricsLog, step: int, shutdown: ShutdownBudget
) -> None:
    """Measure losses and updates, and generate the previews: where the model runs between two steps."""

    def measure_loss() -> MeasuredLoss:
        measured = built.validation_loss.measure(built.transformer)
        metrics.log(step, measured.values)
        measured.log(step)
        return measured

    with _as_measured(built, saver):
        with shutdown.timing("evaluation"):  # Previews are left out by a run that is to stop.
            measured = _between_steps(built, measure_loss) or MeasuredLoss()
            _between_steps(built, lambda: built.item_losses.record(built.transformer, step))
        _between_steps(built, lambda: built.generate(step))
    measure_updates(built, step)
    built.sample_losses.write(step)  # The best so far is saved below.
    if measured.values:
        built.divergence.note_loss(
            step, is_finite=isfinite(measured.mean), is_of_average=saver.measures_average
        )
    saver.note_progress(step, measured.by_item)
    saver.update_best(step, measured.mean)


def _make_up_previews(run: Run, built: TrainingObjects, saver: Saver, step: int) -> None:
    """Generate previews that were due at the step that a run resumes from, and left out when it stopped."""
    were_due = step < run.config.train.steps and _is_due(step, run.config.validation.every_steps, step + 1)
    if were_due and from_main_process(built.accelerator, built.lacks_images, step):
        with _as_measured(built, saver):
            _between_steps(built, lambda: built.generate(step))
        saver.note_progress(step, ())


def _as_measured(built: TrainingObjects, saver: Saver) -> AbstractContextManager[None]:
    """Scope in which the model has the weights that are measured: the average's, where that is the result."""
    averaged = built.averaged if saver.measures_average else None
    return nullcontext() if averaged is None else averaged.applied()


def measure_updates(built: TrainingObjects, step: int) -> None:
    """Write down how large the updates that are trained have become, once for each step."""
    num_skipped, averaged = built.divergence.num_skipped, built.averaged
    with averaged.applied() if averaged is not None and averaged.is_result else nullcontext():
        _between_steps(built, lambda: built.layer_updates.record(step, num_skipped=num_skipped))


def _between_steps(built: TrainingObjects, work: Callable[[], _Result]) -> _Result | None:
    """Compute with the model, and write the results: on the main process, while the others wait.

    Where they share the base or the sequences they compute, too, as each forward pass needs all of them.
    """
    if built.runs_together:
        return on_all_processes(built.accelerator, work)[0]
    return on_main_process(built.accelerator, work)


def _is_due(step: int, every_steps: int | None, total_steps: int) -> bool:
    return step == total_steps or (every_steps is not None and step % every_steps == 0)


def _require_few_skips(built: TrainingObjects, step: int) -> None:
    """Check on all processes what has been skipped; only the main one knows which checkpoint is good."""
    if built.divergence.num_skipped_in_a_row:
        on_main_process(built.accelerator, built.divergence.require_few_in_a_row, step)


def _skip(
    built: TrainingObjects, step: int, loss: float, norm: float, micro_batches: Sequence[Batch]
) -> None:
    names = ", ".join(name for batch in micro_batches for name in batch.names)
    logger.warning("Step %d is skipped: loss %s, gradient norm %s, on %s.", step, loss, norm, names)
    built.divergence.note_skipped(names)
