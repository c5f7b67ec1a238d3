"""Gradient checkpointing of single blocks, with their inputs parked in host memory, and its report."""

from diffsynth_lite.core.gradient.blocks import blocks_in, blocks_of, blocks_run_by, count_blocks, unwrapped
from diffsynth_lite.core.gradient.checkpoint import (
    block_runner,
    blocks_through,
    gradient_checkpoint_forward,
    gradient_engine,
    gradient_flags,
)
from diffsynth_lite.core.gradient.engine import GradientEngine
from diffsynth_lite.core.gradient.host_pool import HostBytesError
from diffsynth_lite.core.gradient.policies import (
    KEEP,
    PARK,
    RECOMPUTE,
    BlockPolicy,
    SaveAttention,
    Selection,
    Treatment,
)
from diffsynth_lite.core.gradient.report import GradientReport, IneffectiveSwitchError

__all__ = [
    "KEEP",
    "PARK",
    "RECOMPUTE",
    "BlockPolicy",
    "GradientEngine",
    "GradientReport",
    "HostBytesError",
    "IneffectiveSwitchError",
    "SaveAttention",
    "Selection",
    "Treatment",
    "block_runner",
    "blocks_in",
    "blocks_of",
    "blocks_run_by",
    "blocks_through",
    "count_blocks",
    "gradient_checkpoint_forward",
    "gradient_engine",
    "gradient_flags",
    "unwrapped",
]
