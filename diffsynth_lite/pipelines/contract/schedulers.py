"""This file tells samplers of flow matching from others, and says which one a folder has."""

from typing import Any

_TELLING = ("prediction_type", "use_flow_sigmas")


def matches_flows(scheduler: Any) -> bool:
    """Whether a scheduler of diffusers takes what a model predicts for a velocity, at noise levels in [0, 1].

    Some classes do nothing else and have no setting for it; others do where they are told to.
    """
    prediction_type = scheduler.config.get("prediction_type")
    if prediction_type is None:
        return not hasattr(scheduler, "alphas_cumprod")
    return prediction_type == "flow_prediction" and bool(scheduler.config.get("use_flow_sigmas"))


def described(scheduler: Any) -> str:
    """Class of a scheduler, with the settings that say what it samples."""
    settings = [f"{name} {scheduler.config[name]}" for name in _TELLING if name in scheduler.config]
    return " with ".join(filter(None, [type(scheduler).__name__, " and ".join(settings)]))
