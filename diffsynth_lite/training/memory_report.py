"""This file logs what the memory and speed settings did, and explains a full device."""

import logging
from contextlib import AbstractContextManager
from functools import partial

import torch

from diffsynth_lite.core.gradient import BlockCompiler, GradientEngine, IneffectiveSwitchError
from diffsynth_lite.core.weights import QuantizationReport, ShardReport, local_bytes
from diffsynth_lite.errors import UserError
from diffsynth_lite.run_folder.metrics import MetricsLog
from diffsynth_lite.training.builder import TrainingObjects
from diffsynth_lite.training.data_settings import num_tokens_of
from diffsynth_lite.training.distributed.devices import batch_layout
from diffsynth_lite.training.encoding.run_encoding import TrainingData
from diffsynth_lite.training.planning.automatic import what_fits
from diffsynth_lite.training.session import Run
from diffsynth_lite.training.shortages import Workload, out_of_memory_explained
from diffsynth_lite.training.streaming import quantizable_bytes, streamable_bytes

logger = logging.getLogger(__name__)


def report_memory(
    run: Run, built: TrainingObjects, engine: GradientEngine, metrics: MetricsLog, step: int
) -> None:
    """Log what is quantised, sharded and split, and what the other switches did in the first step.

    Raises:
        UserError: a switch that is on had no effect.
    """
    config, checked, context = run.config, run.checked, run.family.context
    report, streamed = engine.report(), built.weights.report()
    num_micro_batches = batch_layout(config, built.accelerator.num_processes).num_micro_steps
    split = None if context is None else context.report()
    try:
        report.require_effect(
            **engine.flags,
            save_attention=config.memory.save_attention != "no",
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


def memory_explained(run: Run, data: TrainingData, built: TrainingObjects) -> AbstractContextManager[None]:
    """Scope in which a full device ends the run with what it held, and what would help."""
    config, family = run.config, run.family
    train, transformer, weights = config.train, built.transformer, built.weights
    model = family.folder.component_config(family.trained[0])
    heads, head_width = (model.get(name) for name in ("num_attention_heads", "attention_head_dim"))
    num_tokens = max(num_tokens_of(bucket, family) for bucket in data.items.buckets)
    frozen = [weight for weight in transformer.parameters() if not weight.requires_grad]
    float32_bytes = local_bytes(weight for weight in frozen if weight.dtype == torch.float32)
    workload = Workload(
        tokens=num_tokens // train.context_parallel,
        width=heads * head_width if isinstance(heads, int) and isinstance(head_width, int) else None,
        micro_batch_size=train.micro_batch_size,
        num_blocks=run.checked.num_blocks,
        streamable_bytes=streamable_bytes(config, family, transformer, weights),
        quantizable_bytes=quantizable_bytes(family, transformer),
        num_checkpointed=run.checked.num_selected_blocks if train.use_gradient_checkpointing else 0,
        offloads=train.use_gradient_checkpointing_offload,
        # In the backward pass those of one block, and what is fetched ahead.
        blocks_on_device=max(config.memory.resident_blocks, 1 + config.memory.prefetched_blocks),
        has_token_budget=train.micro_batch_tokens is not None,
        float32_bytes=float32_bytes if config.model.dtype == "float32" else 0,
    )
    return out_of_memory_explained(
        workload,
        transformer,
        built.optimizer,
        plan=partial(what_fits, config, family, run.accelerator),
        slot_bytes=weights.slot_bytes,
    )


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
