"""The section ``objective``: which noise levels are trained, and how much each counts."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from diffsynth_lite.config.field_type import Range
from diffsynth_lite.config.settings import Problem, Settings

# The density that each setting belongs to; with another one it would do nothing.
_DENSITY_OF = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings(Settings):
    """The model sees an image mixed with noise, at a noise level sigma between 0 (clean) and 1 (noise alone),
    and learns to predict what takes one to the other. With SDXL sigma is the timestep, as a part of all."""

    timestep_density: Literal["uniform", "logit_normal", "mode", "cosmap"] = "uniform"
    """How noise levels are drawn, before the shift: all alike, or with more weight on some, as in Stable
    Diffusion 3 (Esser et al. 2024, arXiv:2403.03206, section 3.1)."""

    logit_mean: float = 0.0
    """Centre of `logit_normal`: 0 favours sigma 0.5, above 0 more noise, below 0 less."""

    logit_std: Annotated[float, Range(above=0)] = 1.0
    """Width of `logit_normal`: less than 1 stays closer to the centre."""

    mode_scale: Annotated[float, Range(at_least=-1, at_most=1.75)] = 1.29
    """Strength of `mode`: above 0 favours the middle, below 0 both ends, 0 is uniform."""

    shift: Literal["family", "none", "static", "resolution"] = "family"
    """How drawn noise levels are moved towards more noise, which larger images need: as the model family was
    trained, not at all, by `shift_value`, or by the number of image tokens."""

    shift_value: Annotated[float | None, Range(above=0)] = None
    """The static shift s: sigma becomes s * sigma / (1 + (s - 1) * sigma). Above 1 trains more at high
    noise; 3 is common."""

    sigma_min: Annotated[float, Range(at_least=0, below=1)] = 0.0
    """Lowest noise level trained on, after the shift. Raise it to learn composition rather than texture."""

    sigma_max: Annotated[float, Range(above=0, at_most=1)] = 1.0
    """Highest noise level trained on, after the shift. Lower it to learn texture rather than composition."""

    loss_weighting: Literal["none", "sigma_sqrt", "cosmap", "bell", "min_snr"] = "none"
    """How much a noise level counts in the loss: all alike, 1 / sigma^2 (diffusers calls this `sigma_sqrt`),
    the cosine map of the same paper, most in the middle (`bell`), or by the ratio of signal to noise, cut off
    (`min_snr`; Hang et al. 2023, arXiv:2303.09556). SDXL has `none` and `min_snr`."""

    min_snr_gamma: Annotated[float, Range(above=0)] = 5.0
    """Where `min_snr` cuts the ratio of signal to noise off; 5 is the paper's."""

    def conflicts(self) -> Iterator[Problem]:
        for key, density in _DENSITY_OF.items():
            if self.timestep_density != density and not self.is_default(key):
                yield _without_effect(key, "timestep_density", self.timestep_density, density)
        if self.loss_weighting != "min_snr" and not self.is_default("min_snr_gamma"):
            yield _without_effect("min_snr_gamma", "loss_weighting", self.loss_weighting, "min_snr")
        if self.shift != "static" and self.shift_value is not None:
            yield _without_effect("shift_value", "shift", self.shift, "static")
        if self.shift == "static" and self.shift_value is None:
            message = "objective.shift static needs objective.shift_value, such as 3.0"
            yield Problem(("shift", "shift_value"), message)
        if self.sigma_min >= self.sigma_max:
            message = (
                f"objective.sigma_min {self.sigma_min} must be less than objective.sigma_max {self.sigma_max}"
            )
            yield Problem(("sigma_min", "sigma_max"), message)


def _without_effect(key: str, owner: str, value: str, wanted: str) -> Problem:
    message = (
        f"objective.{key} has no effect with objective.{owner} {value}; remove it, or set {owner}: {wanted}"
    )
    return Problem((key, owner), message)
