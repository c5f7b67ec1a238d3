"""This file has what families share that are trained on denoising diffusion, in place of flow matching."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

import torch

from diffsynth_lite.core.noise.paths import DiffusionPath, PredictionType
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines.base.diffusers_components import described
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily

_FEW_STEP_SAMPLERS = ("LCMScheduler", "TCDScheduler")


class DiffusionFamily(DiffusersFamily):
    """A family of diffusers whose scheduler has ``alphas_cumprod``: the noise of each of its timesteps.

    Its ``predict`` returns what the scheduler's ``prediction_type`` names, the noise or v. The model's
    timestep is ``self.noise_path.timestep(sigma)``: a noise level is the part of all timesteps that lie
    below.
    """

    @property
    def prediction_type(self) -> Any:
        """By the folder's scheduler: ``epsilon`` or ``v_prediction``, else ``check_scheduler`` refuses it."""
        return self.scheduler_config.get("prediction_type", "epsilon")

    @cached_property
    def noise_path(self) -> DiffusionPath:
        return DiffusionPath(self.load_scheduler().alphas_cumprod, self.prediction_type)

    def timestep(self, sigma: torch.Tensor, like: Mapping[str, Any]) -> torch.Tensor:
        return self.noise_path.timestep(sigma)

    @property
    def distilled(self) -> str | None:
        """Turbo, LCM and the like: the sampler is one for few steps. Better train what they were made from.

        Source: the page of SDXL Turbo in the documentation of diffusers, for ``trailing``; models whose last
        timestep is all noise have it too.
        """
        config = self.scheduler_config
        name, spacing = config.get("_class_name"), config.get("timestep_spacing")
        is_trailing = spacing == "trailing" and not config.get("rescale_betas_zero_snr")
        if not is_trailing and name not in _FEW_STEP_SAMPLERS:
            return None
        return (
            f"its sampler, {name} with timestep_spacing {spacing}, is one for few steps; better train what "
            "it was made from"
        )

    def check_scheduler(self, scheduler: Any) -> None:
        known = get_args(PredictionType)
        if self.prediction_type not in known or not hasattr(scheduler, "alphas_cumprod"):
            raise UserError(
                f"model.path: {self.folder.place('scheduler')}: {described(scheduler)} is not a sampler of "
                f"denoising diffusion that predicts {' or '.join(known)}, which this family trains; get the "
                "folder's own scheduler again, or check model.path and model.family"
            )

    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        raise UserError(
            "objective.shift: resolution is not defined for this family, whose timesteps have the same noise "
            "at any size; use family, none or static"
        )

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """None: a timestep has the same noise at any size.

        diffusers' training scripts for such models, as ``train_text_to_image_lora_sdxl.py``, draw all
        timesteps alike, too.
        """
        return 1.0
