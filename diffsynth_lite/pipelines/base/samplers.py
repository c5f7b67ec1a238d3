"""This file knows what diffusers' samplers do: whether they match flows, and how they shift noise levels."""

import inspect
import math
from typing import Any

from diffsynth_lite.errors import UserError

_TELLING = ("prediction_type", "use_flow_sigmas")


def exponential_shift(mu: float) -> float:
    """``exp(mu)``; refused where no float is as large."""
    try:
        return math.exp(mu)
    except OverflowError:
        raise UserError(
            f"objective.shift: that of the sampler is exp({mu:.0f}) for images or clips of this size, "
            "which no number holds; take smaller ones, or set objective.shift: static"
        ) from None


def matches_flows(scheduler: Any) -> bool:
    """Whether a scheduler of diffusers takes what a model predicts for a velocity, at noise levels in [0, 1].

    Classes that take ``prediction_type`` do where it is set so. Of the others, those without a table of a
    diffusion's noise do; a setting that a class does not take may be in its file all the same.
    """
    if "prediction_type" not in inspect.signature(type(scheduler)).parameters:
        return not hasattr(scheduler, "alphas_cumprod")
    config = scheduler.config
    return config.prediction_type == "flow_prediction" and bool(config.get("use_flow_sigmas"))


def described(scheduler: Any) -> str:
    """Class of a scheduler, with the settings that define what it samples."""
    settings = [f"{name} {scheduler.config[name]}" for name in _TELLING if name in scheduler.config]
    return " with ".join(filter(None, [type(scheduler).__name__, " and ".join(settings)]))
