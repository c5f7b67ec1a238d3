"""This file has LTX-2's pipelines generate from encoded prompts, with a release's sampler and guidance.

Layouts: b batch, l tokens, d channels.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES

from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest
from diffsynth_lite.pipelines.base.model_settings import ModelSettings
from diffsynth_lite.pipelines.ltx2.releases import SAMPLER_OF_FULL

STREAMS = ("prompt_embeds", "audio_prompt_embeds")
"""Names of what the stream of the clip and that of its audio read of a prompt."""
_WITHOUT_GUIDANCE = {
    "guidance_scale": 1.0,
    "audio_guidance_scale": 1.0,
    "stg_scale": 0.0,
    "audio_stg_scale": 0.0,
    "modality_scale": 1.0,
    "audio_modality_scale": 1.0,
}


def guidance_arguments(scale: float, *, perturbs: bool) -> dict[str, float]:
    """Arguments of a pipeline: its defaults for all but the scale that is given, or no guidance.

    Args:
        scale: of guidance by a negative prompt; at 1 or less the other kinds are off, too.
        perturbs: whether the transformer has blocks that can do without attention. Without them the run
            without attention would equal the plain one.
    """
    if scale <= 1:
        return _WITHOUT_GUIDANCE
    return {"guidance_scale": scale} | ({} if perturbs else {"stg_scale": 0.0, "audio_stg_scale": 0.0})


class ReleasedSampler(DiffusersFamily):
    """A family whose folders may have the sampler of a distilled model, which takes levels as they are."""

    @cached_property
    def scheduler_config(self) -> ModelSettings:
        """The folder's; of a distilled one, to which a file brings the full model, with the shift of that."""
        config = self.folder.component_config("scheduler")
        return ModelSettings({**config, **SAMPLER_OF_FULL}, config.file) if self._is_made_full else config

    @property
    def _is_made_full(self) -> bool:
        file = self.folder.files.get("transformer")
        is_distilled = not self.folder.component_config("scheduler").get("use_dynamic_shifting")
        return is_distilled and file is not None and "distilled" not in file.path.name

    @property
    def distilled(self) -> str | None:
        """Without `use_dynamic_shifting` in the scheduler's settings. Better train the full model."""
        if self.scheduler_config.get("use_dynamic_shifting"):
            return None
        return (
            "use_dynamic_shifting is off in its scheduler; better train the full model, named as "
            "model.transformer_file"
        )

    def usage_setup(self, request: PreviewRequest) -> list[str]:
        if not self._is_made_full:
            return []
        settings = ", ".join(f"{name}={value}" for name, value in SAMPLER_OF_FULL.items())
        return [
            "scheduler = pipeline.scheduler  # for the distilled model",
            f"pipeline.scheduler = scheduler.from_config(scheduler.config, {settings})",
        ]

    def sampling(self, request: PreviewRequest) -> dict[str, Any]:
        """Arguments of a pipeline: guidance, and a distilled model's noise levels where they are as many."""
        perturbs = self.folder.component_config("transformer").get("perturbed_attn", False)
        guidance = guidance_arguments(request.guidance_scale, perturbs=perturbs)
        if self.distilled is None or request.num_inference_steps != len(DISTILLED_SIGMA_VALUES):
            return guidance
        return {**guidance, "sigmas": DISTILLED_SIGMA_VALUES}


class Connected:
    """Replaces the connectors of a pipeline with their outputs, side by side.

    Args:
        video_width: channels of what the stream of the clip reads.
    """

    def __init__(self, video_width: int) -> None:
        self._video_width = video_width

    def __call__(
        self, streams_bld: torch.Tensor, mask: torch.Tensor, *, padding_side: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the connectors gave, and that nothing of it is hidden."""
        width = self._video_width
        return streams_bld[..., :width], streams_bld[..., width:], mask


def prompt_arguments(prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Arguments of a pipeline that has a :class:`Connected`."""
    streams_bld = torch.cat([prompt[name] for name in STREAMS], dim=-1)[None].to(**like)
    mask = torch.ones(streams_bld.shape[:2], dtype=torch.long, device=like["device"])
    return {"prompt_embeds": streams_bld, "prompt_attention_mask": mask}
