"""Flow matching: which noise levels are trained, how they are reached, and how much each one counts."""

from diffsynth_lite.core.noise.densities import TimestepDensity, sigma_from_uniform
from diffsynth_lite.core.noise.flow_matching import add_noise, velocity
from diffsynth_lite.core.noise.shifts import exponential_shift, resolution_mu, shift_sigma
from diffsynth_lite.core.noise.weights import LossWeighting, loss_weight

__all__ = [
    "LossWeighting",
    "TimestepDensity",
    "add_noise",
    "exponential_shift",
    "loss_weight",
    "resolution_mu",
    "shift_sigma",
    "sigma_from_uniform",
    "velocity",
]
