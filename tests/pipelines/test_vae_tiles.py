"""Autoencoders in tiles: which sizes are split, and what happens where a device is full."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from diffsynth_lite.pipelines.base.vae_tiles import VaeTiles, has_frames, tile_when_full, tiles_of
from diffsynth_lite.testing.autoencoders import (
    tiny_cogvideox_vae,
    tiny_dc_vae,
    tiny_flux2_vae,
    tiny_flux_vae,
    tiny_hunyuan_video_15_vae,
    tiny_hunyuan_video_vae,
    tiny_ltx2_vae,
    tiny_ltx_vae,
    tiny_qwen21_vae,
    tiny_qwen_vae,
    tiny_sdxl_vae,
    tiny_wan_vae,
)

AUTOENCODERS: dict[str, Callable[[], Any]] = {
    "cogvideox": tiny_cogvideox_vae,
    "sdxl": tiny_sdxl_vae,
    "flux": tiny_flux_vae,
    "flux2": tiny_flux2_vae,
    "qwen_image": tiny_qwen_vae,
    "qwen_image_21": tiny_qwen21_vae,
    "wan": tiny_wan_vae,
    "wan_ti2v": lambda: tiny_wan_vae(residual=True),
    "ltx2": tiny_ltx2_vae,
    "ltx_video": tiny_ltx_vae,
    "hunyuan_video": tiny_hunyuan_video_vae,
    "hunyuan_video_15": tiny_hunyuan_video_15_vae,
    "sana": tiny_dc_vae,
}
HEIGHT = 32
MORE = 64


def tiles_for(vae: Any) -> VaeTiles:
    tiles = tiles_of(type(vae), vae.config)
    assert tiles is not None
    return tiles


def pixels(vae: Any, width: int, num_frames: int = 1) -> Tensor:
    channels = 4 if "Qwen" in type(vae).__name__ and vae.config.z_dim == 64 else 3  # one of transparency
    shape = (1, channels, num_frames, HEIGHT, width) if has_frames(vae) else (1, 3, HEIGHT, width)
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@torch.no_grad()
def encoded(vae: Any, image: Tensor) -> Tensor:
    output = vae.encode(image)
    latents: Tensor = output.latent if hasattr(output, "latent") else output.latent_dist.mode()
    return latents


@torch.no_grad()
def decoded(vae: Any, latents: Tensor) -> Tensor:
    image: Tensor = vae.decode(latents).sample
    return image


def sizes_seen(module: torch.nn.Module) -> list[torch.Size]:
    """Sizes of what a module gets from now on."""
    seen: list[torch.Size] = []
    module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].shape))
    return seen


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_what_is_larger_than_a_tile_is_encoded_and_decoded_in_parts_and_nothing_else(name: str) -> None:
    whole, tiled = AUTOENCODERS[name](), AUTOENCODERS[name]()
    tiles = tiles_for(tiled)
    tiles.apply_to(tiled)
    in_encoder, in_decoder = sizes_seen(tiled.encoder), sizes_seen(tiled.decoder)
    for width in (tiles.largest_whole, tiles.side + MORE):
        in_encoder.clear()
        image = pixels(tiled, width)
        expected, found = encoded(whole, image), encoded(tiled, image)
        assert found.shape == expected.shape
        is_split = tiles.split(width, HEIGHT)
        assert is_split == (width > tiles.largest_whole)
        assert (len(in_encoder) > 1) == is_split
        assert torch.equal(found, expected) != is_split
        assert max(size[-1] for size in in_encoder) == min(width, tiles.side) // tiles.patch
    images = decoded(whole, expected), decoded(tiled, expected)
    assert images[0].shape == images[1].shape == image.shape
    assert len(in_decoder) > 1
    assert max(size[-1] for size in in_decoder) < expected.shape[-1]


def test_a_long_clip_of_ltx_is_encoded_in_parts() -> None:
    vae = tiny_ltx_vae()
    tiles = tiles_for(vae)
    assert not tiles.split(512, 512, 9)
    assert tiles.split(512, 512, 25)
    clip = pixels(vae, HEIGHT, 25)
    expected = encoded(vae, clip)
    tiles.apply_to(vae)
    vae.use_framewise_decoding = True
    seen = sizes_seen(vae.encoder)
    found = encoded(vae, clip)
    assert found.shape == expected.shape
    # Each part begins 8 frames later than the one before, whose last latents they share.
    assert [size[2] for size in seen] == [17, 17, 9, 1]
    torch.testing.assert_close(found[:, :, :2], expected[:, :, :2])


def test_an_autoencoder_that_is_not_known_has_no_tiles() -> None:
    assert tiles_of(torch.nn.Module, {}) is None
    assert str(tiles_of(AutoencoderKLWan, {"patch_size": 2})) == "tiles of 512 pixels, 384 apart"


def test_an_image_that_does_not_fit_on_the_device_is_decoded_in_tiles(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    vae, expected = tiny_sdxl_vae(), tiny_sdxl_vae()
    tiles = tiles_for(vae)
    tiles.apply_to(expected)
    tile_when_full(vae, tiles)
    room = sizes_seen(vae.decoder)

    def refuse_large(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].shape[-1] > tiles.side // 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    vae.decoder.register_forward_pre_hook(refuse_large)
    small, large = (torch.ones(1, 4, 4, width // 8) for width in (tiles.side, tiles.side + MORE))
    assert torch.equal(decoded(vae, small), decoded(tiny_sdxl_vae(), small))
    assert "tiles" not in caplog.text
    for _ in range(2):
        assert torch.equal(decoded(vae, large), decoded(expected, large))
    assert sum(size[-1] > tiles.side // 8 for size in room) == 1  # the second time nobody tries
    assert caplog.text.count("it is decoded in tiles of 512 pixels, 384 apart") == 1
    image = pixels(vae, tiles.side + MORE)
    assert torch.equal(encoded(vae, image), encoded(tiny_sdxl_vae(), image))
