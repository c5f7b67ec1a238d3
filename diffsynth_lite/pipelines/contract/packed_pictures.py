"""This file lays pictures out as tokens as FLUX.1 and the models made from it do: 2 x 2 latents a token."""

from collections.abc import Sequence

import torch
from diffusers import FluxPipeline

PATCH = 2
"""Latents to a side of a token."""


def pack_pictures(pictures: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of pictures, one behind the other, and where each token stands.

    Args:
        pictures: each (B, C, H_i, W_i), its latents, H_i and W_i even.

    Returns:
        (B, L, 4 C), with L the sum of H_i * W_i / 4; and (L, 3), of each token the place of its picture in
        ``pictures``, its row and its column.
    """
    tokens_bld = [FluxPipeline._pack_latents(picture, *picture.shape) for picture in pictures]
    positions = [_positions(picture, place) for place, picture in enumerate(pictures)]
    return torch.cat(tokens_bld, dim=1), torch.cat(positions)


def unpack_picture(tokens_bld: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The first picture in a sequence of tokens.

    Args:
        tokens_bld: (B, L, 4 C), L at least height * width / 4.
        height: of its latents, even.
        width: of its latents, even.

    Returns:
        (B, C, height, width).
    """
    picture_bchw: torch.Tensor = FluxPipeline._unpack_latents(
        tokens_bld[:, : height * width // PATCH**2], height, width, vae_scale_factor=1
    )
    return picture_bchw


def _positions(picture_bchw: torch.Tensor, place: int) -> torch.Tensor:
    batch, _, height, width = picture_bchw.shape
    positions: torch.Tensor = FluxPipeline._prepare_latent_image_ids(
        batch, height // PATCH, width // PATCH, picture_bchw.device, torch.float32
    )
    positions[:, 0] = place
    return positions
