"""This file says what the switches for memory and speed did, and stops a run in which one did nothing.

It also says what decides how much memory a step takes.
"""

import logging
from typing import Protocol

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import BlockCompiler, GradientEngine, IneffectiveSwitchError
from diffsynth_lite.core.weights import QuantizationReport, ShardReport, WeightStream, local_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.metrics import MetricsLog
from diffsynth_lite.training.checks import CheckedRun
from diffsynth_lite.training.data_settings import num_tokens_of
from diffsynth_lite.training.distributed.devices import batch_layout
from diffsynth_lite.training.encoding.run_encoding import TrainingData
from diffsynth_lite.training.shortages import Workload
from diffsynth_lite.training.streaming import quantizable_bytes, streamable_bytes

logger = logging.getLogger(__name__)


class Trained(Protocol):
    """What is trained, and what its switches work on."""

    accelerator: Accelerator
    transformer: torch.nn.Module
    weights: WeightStream
    compiler: BlockCompiler


def report_memory(
    config: Config,
    checked: CheckedRun,
    built: Trained,
    engine: GradientEngine,
    metrics: MetricsLog,
    step: int,
) -> None:
    """Log what is quantised, sharded and split, and what the other switches did in the first step.

    Raises:
        UserError: a switch that is on had no effect.
    """
    memory, context = config.memory, checked.family.context
    report, streamed = engine.report(), built.weights.report()
    num_micro_batches = batch_layout(config, built.accelerator.num_processes).num_micro_steps
    split = None if context is None else context.report()
    try:
        report.require_effect(
            **engine.flags,
            save_attention=memory.save_attention != "no",
            expected_blocks=checked.num_blocks * num_micro_batches,
            expected_checkpointed=checked.num_selected_blocks * num_micro_batches,
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


def workload_of(
    config: Config,
    checked: CheckedRun,
    encoded: TrainingData,
    transformer: torch.nn.Module,
    weights: WeightStream,
) -> Workload:
    """What a step holds in memory, for the advice when the device is full."""
    train, family = config.train, checked.family
    model = family.folder.component_config(family.trained[0])
    heads, head_width = (model.get(name) for name in ("num_attention_heads", "attention_head_dim"))
    return Workload(
        tokens=max(num_tokens_of(bucket, family) for bucket in encoded.items.buckets)
        // train.context_parallel,
        width=heads * head_width if isinstance(heads, int) and isinstance(head_width, int) else None,
        micro_batch_size=train.micro_batch_size,
        num_blocks=checked.num_blocks,
        streamable_bytes=streamable_bytes(config, family, transformer, weights),
        quantizable_bytes=quantizable_bytes(family, transformer),
        num_checkpointed=checked.num_selected_blocks if train.use_gradient_checkpointing else 0,
        offloads=train.use_gradient_checkpointing_offload,
        # In the backward pass those of one block, and what is fetched ahead.
        blocks_on_device=max(config.memory.resident_blocks, 1 + config.memory.prefetched_blocks),
        has_token_budget=train.micro_batch_tokens is not None,
        float32_bytes=_float32_bytes(transformer) if config.model.dtype == "float32" else 0,
    )


def _float32_bytes(model: torch.nn.Module) -> int:
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return local_bytes(parameter for parameter in frozen if parameter.dtype == torch.float32)


def report_graphs(compiler: BlockCompiler, metrics: MetricsLog, step: int) -> None:
    """Log what was compiled, after each step in which something was."""
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
