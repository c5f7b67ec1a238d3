"""This file logs the effects of the memory and speed settings, and stops a run in which one has none."""

import logging

from diffsynth_lite.core.gradient import BlockCompiler, GradientEngine, IneffectiveSwitchError
from diffsynth_lite.core.weights import QuantizationReport, ShardReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.metrics import MetricsLog
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.distributed.devices import batch_layout
from diffsynth_lite.training.session import Run

logger = logging.getLogger(__name__)


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


def report_graphs(compiler: BlockCompiler, metrics: MetricsLog, step: int) -> None:
    """Log the compiled graphs, after each step that compiled one."""
    if not compiler.new_graphs():
        return
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
