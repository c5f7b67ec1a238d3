"""What ``model.vae_tiling`` changes, and what it saves.

Each autoencoder encodes a picture or clip of noise whose spectrum is about that of photographs, as a whole
and in tiles, and decodes the latents of the whole both ways. Differences are norms, as a part of the norm of
what the whole gives. The small autoencoders are random, but for those of the quickstarts, which are trained.

    python scripts/benchmarks/autoencoders.py [--only NAME ...]
    python scripts/benchmarks/autoencoders.py --releases [--only NAME ...]

The second form counts what each released autoencoder needs beside its weights, in float32 and at full size,
on torch's meta device, where nothing is computed. Attention is counted as one kernel, and what kernels use
inside of themselves is not seen.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from meters import print_table
from torch import Tensor, nn

from diffsynth_lite.core.planning import ON_ALL_DEVICES, CountingMeter, FusedKernels
from diffsynth_lite.pipelines import family_names, load_family
from diffsynth_lite.pipelines.base.release_folder import class_of, empty_model, full_config
from diffsynth_lite.pipelines.base.vae_tiles import VaeTiles, has_frames, tiles_of
from diffsynth_lite.testing.autoencoders import (
    tiny_dc_vae,
    tiny_flux2_vae,
    tiny_flux_vae,
    tiny_ltx_vae,
    tiny_qwen_vae,
    tiny_sdxl_vae,
    tiny_wan_vae,
)

META = torch.device("meta")
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
Size = tuple[int, int, int]
"""Width, height and frames."""
PICTURES: tuple[Size, ...] = ((1024, 1024, 1), (1328, 1328, 1))
CLIP: Size = (832, 480, 81)

SMALL: Mapping[str, tuple[Callable[[], nn.Module], Size]] = MappingProxyType(
    {
        "sdxl": (tiny_sdxl_vae, (1024, 1024, 1)),
        "flux": (tiny_flux_vae, (1024, 1024, 1)),
        "flux2": (tiny_flux2_vae, (1024, 1024, 1)),
        "qwen_image": (tiny_qwen_vae, (512, 512, 1)),
        "wan": (tiny_wan_vae, (416, 416, 5)),
        "wan, TI2V-5B": (lambda: tiny_wan_vae(residual=True), (1024, 1024, 1)),
        "ltx_video": (tiny_ltx_vae, (768, 768, 25)),
        "sana": (tiny_dc_vae, (1024, 1024, 1)),
        "qwen_image, of the quickstart": (
            lambda: AutoencoderKLQwenImage.from_pretrained(QUICKSTART / "mini_qwen_image", subfolder="vae"),
            (512, 512, 1),
        ),
        "wan, of the quickstart": (
            lambda: AutoencoderKLWan.from_pretrained(QUICKSTART / "mini_wan", subfolder="vae"),
            (416, 416, 5),
        ),
    }
)
"""Small autoencoders, and a size of several tiles in each direction."""


def noise_clip(size: Size) -> Tensor:
    """(3, F, H, W), in [-1, 1]: amplitudes that fall as 1 / frequency; each frame 4 pixels on."""
    width, height, num_frames = size
    frequency = (torch.fft.fftfreq(height)[:, None].square() + torch.fft.fftfreq(width)[None].square()).sqrt()
    frequency[0, 0] = torch.inf
    white_chw = torch.randn(3, height, width, generator=torch.Generator().manual_seed(0))
    picture_chw = torch.fft.ifft2(torch.fft.fft2(white_chw) / frequency).real
    picture_chw = (picture_chw / picture_chw.std() / 2).clamp(-1, 1)
    return torch.stack([picture_chw.roll(4 * place, dims=-1) for place in range(num_frames)], dim=1)


def encode(vae: Any, pixels: Tensor) -> Tensor:
    """The latents of pixels, as training takes them."""
    output = vae.encode(pixels)
    latents: Tensor = output.latent if hasattr(output, "latent") else output.latent_dist.mode()
    return latents


def decode(vae: Any, latents: Tensor) -> Tensor:
    """The pixels of latents."""
    # From 0.9.1 on that of LTX-Video is told how noisy the latents are.
    timestep = [torch.zeros(1, device=latents.device)] if vae.config.get("timestep_conditioning") else []
    pixels: Tensor = vae.decode(latents, *timestep).sample
    return pixels


def encode_in_tiles(vae: Any, tiles: VaeTiles, pixels: Tensor) -> Tensor:
    """The latents of pixels, as training takes them with ``model.vae_tiling``, which stays on."""
    tiles.apply_to(vae)
    if tiles.num_frames is None:
        return encode(vae, pixels)
    vae.use_framewise_decoding = True  # as family ltx_video has it for what is encoded alone
    try:
        return encode(vae, pixels)
    finally:
        vae.use_framewise_decoding = False


def known_tiles(vae: Any) -> VaeTiles:
    """Those of an autoencoder of a family."""
    tiles = tiles_of(type(vae), vae.config)
    assert tiles is not None
    return tiles


@torch.no_grad()
def difference_row(name: str, vae: Any, size: Size) -> dict[str, str]:
    """How far what an autoencoder gives in tiles is from what it gives as a whole."""
    tiles, pixels = known_tiles(vae), noise_clip(size)[None]
    assert tiles.split(*size), f"{name}: {size} is one tile"
    pixels = pixels if has_frames(vae) else pixels[:, :, 0]
    latents = encode(vae, pixels)
    whole = decode(vae, latents)
    found = encode_in_tiles(vae, tiles, pixels), decode(vae, latents)
    differences = [
        f"{((ours - theirs).norm() / theirs.norm()).item():.3f}"
        for ours, theirs in zip(found, (latents, whole), strict=True)
    ]
    row = {"autoencoder": name, "size": size_name(size), "tile": f"{tiles.side}", "apart": f"{tiles.stride}"}
    return row | dict(zip(("latents", "pictures"), differences, strict=True))


def size_name(size: Size) -> str:
    """Such as ``832x480x81``."""
    return "x".join(str(side) for side in (size if size[2] > 1 else size[:2]))


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes of most tensors at once, beside those that there were before."""
    meter = CountingMeter()
    with torch.no_grad(), FusedKernels(ON_ALL_DEVICES), meter:
        meter.start()
        call()
        return meter.peak_bytes


def memory_row(name: str, vae: Any, size: Size) -> dict[str, str]:
    """What an autoencoder on the meta device needs for one picture or clip, beside its weights and input."""
    ratio = getattr(vae, "spatial_compression_ratio", 8)
    width, height = (side // ratio * ratio for side in size[:2])
    frames = [size[2]] if has_frames(vae) else []
    pixels = torch.empty(1, 3, *frames, height, width, device=META)
    tiles, latents = known_tiles(vae), encode(vae, pixels)
    peaks = {
        "encode": peak_bytes(lambda: encode(vae, pixels)),
        "decode": peak_bytes(lambda: decode(vae, latents)),
        "encode, tiled": peak_bytes(lambda: encode_in_tiles(vae, tiles, pixels)),
        "decode, tiled": peak_bytes(lambda: decode(vae, latents)),
    }
    weights = sum(parameter.nbytes for parameter in vae.parameters())
    columns = {"autoencoder of": name, "weights": f"{weights / 2**30:.2f}"}
    columns["size"] = size_name((width, height, size[2]))
    return columns | {column: f"{peak / 2**30:.2f}" for column, peak in peaks.items()}


def release_rows(only: Sequence[str] | None) -> Iterator[dict[str, str]]:
    """The rows of all released autoencoders that differ, by the first release that has each."""
    seen = []
    for family in map(load_family, family_names()):
        for release in family.releases:
            component = release.components["vae"]
            settings = full_config(component)
            if settings in seen or (only and release.name not in only):
                continue
            seen.append(settings)
            for size in (*PICTURES, *([CLIP] if family.frame_step else [])):
                vae = empty_model(class_of(component), settings).eval().requires_grad_(False)
                yield memory_row(release.name, vae, size)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--only", action="append", help="an autoencoder or release; default: all (repeatable)"
    )
    parser.add_argument("--releases", action="store_true", help="count the memory of released ones")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.releases:
        print_table("GiB beside the weights, float32.", list(release_rows(options.only)))
        return
    rows = [
        difference_row(name, build().eval(), size)
        for name, (build, size) in SMALL.items()
        if not options.only or name in options.only
    ]
    print_table("Tiled against whole.", rows)


if __name__ == "__main__":
    main()
