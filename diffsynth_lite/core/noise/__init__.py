"""Which noise levels are trained, how they are reached, what is learned there, and how much each counts."""

from diffsynth_lite.core.noise.densities import TimestepDensity, sigma_from_uniform
from diffsynth_lite.core.noise.flow_matching import add_noise, velocity
from diffsynth_lite.core.noise.paths import DiffusionPath, FlowMatchingPath, NoisePath, PredictionType
from diffsynth_lite.core.noise.sample_losses import SampleLosses
from diffsynth_lite.core.noise.shares import (
    LevelShares,
    LossByTenth,
    draw_of_level,
    level_shares,
    mixed_shares,
)
from diffsynth_lite.core.noise.shifts import exponential_shift, resolution_mu, shift_sigma
from diffsynth_lite.core.noise.weights import LossWeighting, loss_weight

__all__ = [
    "DiffusionPath",
    "FlowMatchingPath",
    "LevelShares",
    "LossByTenth",
    "LossWeighting",
    "NoisePath",
    "PredictionType",
    "SampleLosses",
    "TimestepDensity",
    "add_noise",
    "draw_of_level",
    "exponential_shift",
    "level_shares",
    "loss_weight",
    "mixed_shares",
    "resolution_mu",
    "shift_sigma",
    "sigma_from_uniform",
    "velocity",
]
