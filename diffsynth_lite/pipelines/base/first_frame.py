"""This file gives the model a clip's first frame: in the place of the noisy one, or next to all of them.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import ImageOps
from PIL.Image import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE, Code


def preview_start(request: PreviewRequest) -> dict[str, Image]:
    """The image that a preview starts from, cut to its size, as an argument of the pipeline; or nothing."""
    if not request.inputs:
        return {}
    return {"image": ImageOps.fit(request.inputs[0], (request.width, request.height))}


def start_code(request: PreviewRequest) -> dict[str, Code]:
    """What :func:`preview_start` gives, as code that reads it from a file."""
    return {"image": request.fitted(INPUT_IMAGE)} if request.inputs else {}


def require_later_frames(num_frames: int, frame_step: int, *, key: str) -> None:
    """Check that a clip whose first frame is given has others."""
    if num_frames <= frame_step:
        raise UserError(
            f"{key}: {num_frames} frames; this family needs {frame_step} k + 1, of which the first is given, "
            f"such as {frame_step + 1} or {2 * frame_step + 1}"
        )


def encode_start(family: DiffusersFamily, pipeline: Any, item: Media) -> EncodedMedia:
    """What is kept of the image that a clip starts from, if it names one: by ``encode_given`` of a family."""
    assert not item.last_frame, "families that call this take no last frame"
    if item.first_frame is None:
        return {}
    first_bcfhw = family.encode_pixels(
        pipeline.vae, pipeline.video_processor.preprocess_video([[item.first_frame]])
    )
    shape = family.latents_shape(*item.frames[0].size, len(item.frames))
    return first_frame_tensors(first_bcfhw[0], shape)


def first_frame_tensors(first_cfhw: torch.Tensor, latents_shape: Sequence[int]) -> EncodedMedia:
    """What is kept of the image that a clip starts from: its latents, and a mask that they do not count in.

    Args:
        first_cfhw: (C, 1, H, W), normalised latents of the image.
        latents_shape: (C, F, H, W), of those of the clip.
    """
    if latents_shape[1] == 1:
        raise UserError(
            "data.frame_counts: a clip of 1 frame that starts from an image leaves nothing to learn; "
            "give more frames"
        )
    loss_mask = torch.ones(1, *latents_shape[1:])
    loss_mask[:, 0] = 0
    return {"first_frame_latents": first_cfhw, "loss_mask": loss_mask}


def with_first_frames(
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    conditioning: Sequence[Conditioning],
    *,
    patch_size: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy latents, with clean first frames of samples that start from one, and the tokens' timesteps.

    Args:
        latents_bcfhw: (B, C, F, H, W), noisy.
        patch_size: side of the square of latents that is one token.

    Returns:
        (B, C, F, H, W), and (B, F * H * W / patch_size^2) with 0 for the tokens of a first frame; both
        unchanged where no sample has one.
    """
    firsts = [sample.get("first_frame_latents") for sample in conditioning]
    if all(first is None for first in firsts):
        return latents_bcfhw, timestep
    latents_bcfhw = latents_bcfhw.clone()
    _, _, num_frames, height, width = latents_bcfhw.shape
    frame_tokens = height * width // patch_size**2
    timestep_bl = timestep[:, None].repeat(1, num_frames * frame_tokens)
    for place, first_cfhw in enumerate(firsts):
        if first_cfhw is not None:
            latents_bcfhw[place, :, :1] = first_cfhw
            timestep_bl[place, :frame_tokens] = 0
    return latents_bcfhw, timestep_bl


def next_to_first_frame(latents_bcfhw: torch.Tensor, first_bcfhw: torch.Tensor | None) -> torch.Tensor:
    """Latents, the given ones with zeros elsewhere, and a mask of where they are: (B, 2 C + 1, F, H, W)."""
    given_bcfhw, mask = torch.zeros_like(latents_bcfhw), torch.zeros_like(latents_bcfhw[:, :1])
    if first_bcfhw is not None:
        given_bcfhw[:, :, :1], mask[:, :, :1] = first_bcfhw, 1
    return torch.cat([latents_bcfhw, given_bcfhw, mask], dim=1)
