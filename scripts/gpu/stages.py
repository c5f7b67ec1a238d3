"""This file lists the stages, the most telling first for the minutes that they take."""

from gpu import loops, offload_cost, prediction, shapes, truth, upstream, variants
from gpu.stage import Stage

STAGES: tuple[Stage, ...] = (
    truth.STAGE,
    upstream.STAGE,
    offload_cost.STAGE,
    shapes.STAGE,
    prediction.STAGE,
    loops.STAGE,
    variants.STAGE,
)
