"""This file logs the effects of the memory and speed settings, and stops a run in which one has none.

And it compares the memory of a step with its prediction.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from diffsynth_lite.core.gradient import BlockCompiler, GradientEngine, IneffectiveSwitchError
from diffsynth_lite.core.planning.meters import CountingMeter
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights.frozen_linear import QuantizationReport
from diffsynth_lite.core.weights.sharding import ShardReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.metrics import MetricsLog
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.distributed.devices import batch_layout
from diffsynth_lite.training.session import Run

logger = logging.getLogger(__name__)

_TOLERATED = 0.05
"""Fraction of the prediction by which a step may exceed it without a warning."""


def report_memory(
    run: Run, built: TrainingObjects, engine: GradientEngine, metrics: MetricsLog, step: int
) -> None:
    """Log which weights are quantised, sharded and split, and the effects of the other settings on a step."""
    context = run.family.context
    report, streamed = engine.report(), built.weights.report()
    num_micro_batches = batch_layout(run.config, run.accelerator.num_processes).num_micro_steps
    split = None if context is None else context.report()
    try:
        report.require_effect(
            **engine.flags,
            save_attention=run.config.memory.save_attention != "no",
            expected_blocks=run.checked.num_blocks * num_micro_batches,
            expected_checkpointed=run.checked.num_selected_blocks * num_micro_batches,
        )
        streamed.require_effect()
        built.compiler.require_effect()
        if split is not None:
            split.require_effect()
    except IneffectiveSwitchError as error:
        section = "memory" if str(error).startswith(("save_attention", "stream_blocks")) else "train"
        raise UserError(f"{section}.{error}") from error
    quantized, sharded = QuantizationReport.of(built.transformer), ShardReport.of(built.transformer)
    parts = [one for one in (quantized, sharded, split, report, streamed) if one is not None]
    for part in parts:
        for line in part.lines():
            logger.info("%s", line)
    metrics.log(step, {name: value for part in parts for name, value in part.metrics().items()})


def report_graphs(compiler: BlockCompiler, metrics: MetricsLog, step: int) -> bool:
    """Log the compiled graphs, after each step that compiled one; returns whether this one did."""
    if not compiler.new_graphs():
        return False
    report = compiler.report()
    for line in report.lines():
        logger.info("%s", line)
    metrics.log(step, report.metrics())
    if compiler.is_full:
        logger.warning(
            "train.compile: there are %d graphs, the most there may be: where a block fits none of them, it "
            "runs uncompiled from now on.",
            report.graphs_compiled,
        )
    return True


class StepComparison:
    """Measures one step, and compares it with the prediction; does nothing without one.

    It is the second step of a start: the first one allocates memory that stays, such as optimizer state. On
    CUDA the allocator's peak is reset and read; on the CPU each tensor that operators make is counted. No
    result changes.
    """

    def __init__(
        self,
        predicted_bytes: int | None,
        built: TrainingObjects,
        log: Callable[[int, Mapping[str, float]], None],
        start_step: int,
    ) -> None:
        self._predicted_bytes, self._built = predicted_bytes, built
        self._log, self._at_step = log, start_step + 2

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Scope of a step."""
        if self._predicted_bytes is None or step != self._at_step:
            yield
            return
        device = self._built.accelerator.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            yield
            measured = torch.cuda.max_memory_allocated(device)
        else:
            held, meter = self._built.num_bytes_held, CountingMeter(device)
            with meter:
                yield
            measured = held + meter.peak_bytes
        self._compare(step, self._predicted_bytes, measured)

    def _compare(self, step: int, predicted: int, measured: int) -> None:
        self._log(step, {"device_bytes_predicted": predicted, "device_bytes_measured": measured})
        logger.info(
            "device memory   %s in step %d; predicted for the largest size and longest prompt: %s (%+.1f %%)",
            format_bytes(measured),
            step,
            format_bytes(predicted),
            100 * (measured / predicted - 1),
        )
        if measured > (1 + _TOLERATED) * predicted:
            logger.warning(
                "A step takes %.0f %% more of the device than was predicted; where memory is short, set "
                "memory.device_gib lower by as much.",
                100 * (measured / predicted - 1),
            )
