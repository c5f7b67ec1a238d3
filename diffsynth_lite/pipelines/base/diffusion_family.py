"""This file does what families of denoising diffusion have in common, where others match flows."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, get_args

from diffsynth_lite.core.noise import DiffusionPath, PredictionType
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, described


class DiffusionFamily(DiffusersFamily):
    """A family that removes noise in whole timesteps; the folder's scheduler says how much each has."""

    def check_scheduler(self, scheduler: Any) -> None:
        known = get_args(PredictionType)
        if self._prediction_type not in known or not hasattr(scheduler, "alphas_cumprod"):
            raise UserError(
                f"model.path: {self.folder.path / 'scheduler'}: {described(scheduler)} is no sampler of "
                f"denoising diffusion that predicts {' or '.join(known)}, which this family trains; get the "
                "folder's own scheduler again, or check model.path and model.family"
            )

    @property
    def _prediction_type(self) -> Any:
        return self.scheduler_config.get("prediction_type", "epsilon")

    @cached_property
    def noise_path(self) -> DiffusionPath:
        return DiffusionPath(self.load_scheduler().alphas_cumprod, self._prediction_type)

    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        raise UserError(
            "objective.shift: resolution is not defined for this family, whose timesteps have the same noise "
            "at any size; use family, none or static"
        )

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """None: a timestep has the same noise at any size."""
        return 1.0
