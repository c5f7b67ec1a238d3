"""Which noise levels are trained, how they are reached, the targets there, and how much each counts."""

from diffsynth_lite.core.noise.densities import (
    LevelShares,
    TimestepDensity,
    draw_of_level,
    exponential_shift,
    level_shares,
    mixed_shares,
    resolution_mu,
    shift_sigma,
    sigma_from_uniform,
)
from diffsynth_lite.core.noise.losses import LossBreakdown, LossByTenth, MeanLosses, SampleLosses, mean_losses
from diffsynth_lite.core.noise.paths import (
    DiffusionPath,
    FlowMatchingPath,
    LossWeighting,
    NoisePath,
    PredictionType,
    add_noise,
    loss_weight,
    velocity,
)

__all__ = [
    "DiffusionPath",
    "FlowMatchingPath",
    "LevelShares",
    "LossBreakdown",
    "LossByTenth",
    "LossWeighting",
    "MeanLosses",
    "NoisePath",
    "PredictionType",
    "SampleLosses",
    "TimestepDensity",
    "add_noise",
    "draw_of_level",
    "exponential_shift",
    "level_shares",
    "loss_weight",
    "mean_losses",
    "mixed_shares",
    "resolution_mu",
    "shift_sigma",
    "sigma_from_uniform",
    "velocity",
]
