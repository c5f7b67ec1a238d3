"""Gradient checkpointing of single blocks, the offload of their inputs to host memory, and its report."""

from diffsynth_lite.core.gradient.blocks import (
    blocks_in,
    blocks_of,
    count_blocks,
    intercept_blocks,
    unwrapped,
)
from diffsynth_lite.core.gradient.checkpoint import (
    block_runner,
    checkpoint_blocks,
    gradient_checkpoint_forward,
    gradient_engine,
    gradient_flags,
)
from diffsynth_lite.core.gradient.compiled import BlockCompiler, require_compiler
from diffsynth_lite.core.gradient.engine import GradientEngine
from diffsynth_lite.core.gradient.policies import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    BlockPolicy,
    BlockStrategy,
    SaveAttention,
    Selection,
)
from diffsynth_lite.core.reports import CompileReport, GradientReport, IneffectiveSwitchError
from diffsynth_lite.core.transfer.host_pool import HostBytesError

PARK = OFFLOAD
blocks_run_by = intercept_blocks
"""These two are former names, for one release."""

__all__ = [
    "KEEP",
    "OFFLOAD",
    "PARK",
    "RECOMPUTE",
    "BlockCompiler",
    "BlockPolicy",
    "BlockStrategy",
    "CompileReport",
    "GradientEngine",
    "GradientReport",
    "HostBytesError",
    "IneffectiveSwitchError",
    "SaveAttention",
    "Selection",
    "block_runner",
    "blocks_in",
    "blocks_of",
    "blocks_run_by",
    "checkpoint_blocks",
    "count_blocks",
    "gradient_checkpoint_forward",
    "gradient_engine",
    "gradient_flags",
    "intercept_blocks",
    "require_compiler",
    "unwrapped",
]
