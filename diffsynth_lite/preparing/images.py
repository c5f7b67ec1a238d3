"""This file prepares an image, and writes images that were prepared."""

from pathlib import Path

from PIL import Image

from diffsynth_lite.data.images import load_upright
from diffsynth_lite.files import replacing
from diffsynth_lite.preparing.bars import black_bars
from diffsynth_lite.preparing.steps import Fit, Steps

_JPEG_SUFFIXES = (".jpg", ".jpeg")
_JPEG = {"quality": 95, "subsampling": 0}  # without loss that can be seen, colours included


def result_suffix(path: Path) -> str:
    """Suffix of an image that is changed: a JPEG stays one, anything else becomes a PNG."""
    return path.suffix if path.suffix.lower() in _JPEG_SUFFIXES else ".png"


def plan_image(path: Path, steps: Steps) -> tuple[tuple[int, int], Fit]:
    """The upright size of an image, and what becomes of it. It is decoded, so a damaged one is an error."""
    image = load_upright(path)
    box = black_bars(image) if steps.strip_bars else None
    return image.size, Fit.of(image.size, box, steps.max_side)


def prepare_image(source: Path, result: Path, fit: Fit) -> None:
    """Write an image that is changed: with 8 bits a channel and its alpha, upright, without EXIF.

    Its colour profile stays. Training reads pixels as they are, with or without one, so their values stay,
    too; those of CMYK become RGB as in training, and lose it.
    """
    image = load_upright(source)
    profile = None if image.mode in ("CMYK", "YCbCr") else image.info.get("icc_profile")
    if image.has_transparency_data:
        image = image.convert("RGBA")
    elif image.mode != "L":
        image = image.convert("RGB")
    write_image(fit.apply(image), result, profile=profile)


def write_image(image: Image.Image, path: Path, *, profile: bytes | None = None) -> None:
    """Write a JPEG or PNG, by the suffix, in one atomic step."""
    with replacing(path) as temporary:
        if path.suffix.lower() in _JPEG_SUFFIXES:
            image.save(temporary, "JPEG", **_JPEG, icc_profile=profile)
        else:
            image.save(temporary, "PNG", icc_profile=profile)
