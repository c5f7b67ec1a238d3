"""This file has autoencoders work in tiles: overlapping parts of an image or clip, one by one, and blended.

Each tile goes through the encoder or decoder separately, which needs less memory and gives other numbers: at
the edges of tiles, and wherever a layer looks at the whole image.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
)
from diffusers.training_utils import free_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VaeTiles:
    """The tiles that an autoencoder works in.

    Attributes:
        side: of a tile, in pixels.
        stride: pixels from one tile to the next.
        num_frames: a clip of more frames is encoded in parts of that many and one more; None is never.
        patch: pixels of a side that the autoencoder merges into one before it counts them.
    """

    side: int
    stride: int
    num_frames: int | None = None
    patch: int = 1

    def __str__(self) -> str:
        """Such as ``tiles of 512 pixels, 384 apart``; it is part of the cache's keys."""
        frames = "" if self.num_frames is None else f" and {self.num_frames} frames"
        return f"tiles of {self.side} pixels{frames}, {self.stride} apart"

    @property
    def largest_whole(self) -> int:
        """The longest side, in pixels, of an image that is encoded whole."""
        # With merged pixels diffusers 0.42.1 begins a second tile inside of the first one.
        return self.side if self.patch == 1 else self.stride

    def split(self, width: int, height: int, num_frames: int = 1) -> bool:
        """Whether media of this size, in pixels, are encoded in more than one tile."""
        is_long = self.num_frames is not None and num_frames > self.num_frames
        return max(width, height) > self.largest_whole or is_long

    def apply_to(self, vae: Any) -> None:
        """Have an autoencoder work in these tiles; what fits into one stays whole."""
        if isinstance(vae, AutoencoderKL | AutoencoderKLFlux2):
            # Their ``enable_tiling`` takes no sizes: a tile is as large as the images of their training.
            vae.tile_sample_min_size = self.side
            vae.tile_latent_min_size = self.side // 2 ** (len(vae.config.block_out_channels) - 1)
            vae.tile_overlap_factor = 1 - self.stride / self.side
            vae.enable_tiling()
            return
        if isinstance(vae, AutoencoderKLCogVideoX):
            overlap = 1 - self.stride / self.side
            vae.enable_tiling(self.side, self.side, overlap, overlap)
            return
        if isinstance(vae, AutoencoderKLHunyuanVideo15):
            latents = self.side // vae.spatial_compression_ratio
            vae.enable_tiling(self.side, self.side, latents, latents, 1 - self.stride / self.side)
            return
        side, stride = self.side // self.patch, self.stride // self.patch
        in_time = {}
        if self.num_frames is not None:
            in_time = {
                "tile_sample_min_num_frames": self.num_frames,
                "tile_sample_stride_num_frames": self.num_frames // 2,
            }
        vae.enable_tiling(
            tile_sample_min_height=side,
            tile_sample_min_width=side,
            tile_sample_stride_height=stride,
            tile_sample_stride_width=stride,
            **in_time,
        )


_BY_CLASS: Mapping[Any, VaeTiles] = MappingProxyType(
    {
        # diffusers has 1024 for the released ones, which leaves most images whole.
        AutoencoderKL: VaeTiles(side=512, stride=384),
        AutoencoderKLFlux2: VaeTiles(side=512, stride=384),
        # diffusers has half of 720 x 480, and no squares.
        AutoencoderKLCogVideoX: VaeTiles(side=256, stride=192),
        # The others are diffusers' own.
        AutoencoderKLHunyuanVideo: VaeTiles(side=256, stride=192),
        AutoencoderKLHunyuanVideo15: VaeTiles(side=256, stride=192),
        AutoencoderKLQwenImage: VaeTiles(side=256, stride=192),
        AutoencoderKLQwenImage21: VaeTiles(side=256, stride=192),
        AutoencoderKLWan: VaeTiles(side=256, stride=192),
        AutoencoderKLLTX2Video: VaeTiles(side=512, stride=448, num_frames=16),
        AutoencoderKLLTXVideo: VaeTiles(side=512, stride=448, num_frames=16),
        AutoencoderDC: VaeTiles(side=512, stride=448),
    }
)


def tiles_of(vae_class: Any, config: Mapping[str, Any]) -> VaeTiles | None:
    """The tiles that an autoencoder can work in; None where they are not known.

    Args:
        config: its settings, as its ``config.json`` holds them.
    """
    tiles = _BY_CLASS.get(vae_class)
    patch = config.get("patch_size")
    if tiles is None or vae_class is not AutoencoderKLWan or patch is None:
        return tiles
    # Wan 2.2 TI2V-5B: in decoding, which counts latents, a tile is 256 pixels.
    return replace(tiles, side=tiles.side * patch, stride=tiles.stride * patch, patch=patch)


def has_frames(vae: Any) -> bool:
    """Whether an autoencoder takes (B, 3, F, H, W), also of images."""
    settings = {**vae.config, **vars(vae)}
    return "temperal_downsample" in settings or settings.get("temporal_compression_ratio", 1) > 1


def tile_when_full(vae: Any, tiles: VaeTiles) -> None:
    """Have an autoencoder decode in tiles from when a whole image or clip first did not fit on the device.

    What it encodes stays as it is.
    """
    decode, is_full = vae.decode, False

    def decode_fitting(*arguments: Any, **settings: Any) -> Any:
        nonlocal is_full
        if not is_full:
            try:
                return decode(*arguments, **settings)
            except torch.OutOfMemoryError:
                is_full = True
            free_memory()
            logger.info("Decoding a preview does not fit on the device: it is decoded in %s.", tiles)
        tiles.apply_to(vae)
        try:
            return decode(*arguments, **settings)
        finally:
            vae.disable_tiling()

    vae.decode = decode_fitting
