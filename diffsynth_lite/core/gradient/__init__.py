"""Gradient checkpointing of single blocks, with their inputs parked in host memory, and its report."""

from diffsynth_lite.core.gradient.blocks import blocks_of, blocks_run_by
from diffsynth_lite.core.gradient.checkpoint import gradient_checkpoint_forward
from diffsynth_lite.core.gradient.engine import GradientEngine, gradient_engine
from diffsynth_lite.core.gradient.report import GradientReport, IneffectiveSwitchError

__all__ = [
    "GradientEngine",
    "GradientReport",
    "IneffectiveSwitchError",
    "blocks_of",
    "blocks_run_by",
    "gradient_checkpoint_forward",
    "gradient_engine",
]
