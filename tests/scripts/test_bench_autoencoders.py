"""The benchmark of tiled autoencoders compares tiles with the whole, and counts what both need."""

import torch
from autoencoders import (
    SMALL,
    difference_row,
    encode,
    encode_in_tiles,
    known_tiles,
    memory_row,
    noise_clip,
    peak_bytes,
)

from diffsynth_lite.testing.autoencoders import tiny_dc_vae, tiny_ltx_vae, tiny_sdxl_vae


def test_tiles_differ_from_the_whole_by_a_part_of_it() -> None:
    row = difference_row("sdxl", tiny_sdxl_vae(), (576, 64, 1))
    assert (row["size"], row["tile"], row["apart"]) == ("576x64", "512", "384")
    assert all(0 < float(row[name]) < 1 for name in ("latents", "pictures"))


def test_encoding_in_tiles_needs_less_memory() -> None:
    for build, shape in ((tiny_sdxl_vae, (1, 3, 256, 1024)), (tiny_ltx_vae, (1, 3, 41, 64, 64))):
        vae, pixels = build().to("meta").requires_grad_(False), torch.empty(shape, device="meta")
        whole = peak_bytes(lambda vae=vae, pixels=pixels: encode(vae, pixels))
        tiled = peak_bytes(lambda vae=vae, pixels=pixels: encode_in_tiles(vae, known_tiles(vae), pixels))
        assert 0 < tiled < 0.75 * whole


def test_a_row_has_the_sizes_that_an_autoencoder_can_take() -> None:
    row = memory_row("Sana", tiny_dc_vae().to("meta"), (528, 64, 1))
    assert (row["size"], row["weights"]) == ("512x64", "0.00")


def test_each_small_one_gets_a_size_of_several_tiles() -> None:
    clip = noise_clip((64, 32, 3))
    assert clip.shape == (3, 3, 32, 64)
    assert clip.abs().max() <= 1
    assert not torch.equal(clip[:, 0], clip[:, 1])
    for build, size in list(SMALL.values())[:8]:
        assert known_tiles(build()).split(*size)
