"""This file has LTX-2's pipelines generate from prompts that are encoded, with the guidance of previews.

Layouts: b batch, l tokens, d channels.
"""

from collections.abc import Mapping
from typing import Any

import torch

from diffsynth_lite.pipelines.base.family import Conditioning

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
