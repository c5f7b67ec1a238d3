"""This file defines what is done to the files of a folder, and crops, scales and writes images by it."""

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from diffsynth_lite.data.images import load_upright
from diffsynth_lite.files import replacing

_JPEG_SUFFIXES = (".jpg", ".jpeg")
_JPEG = {"quality": 95, "subsampling": 0}  # without loss that can be seen, colours included

Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What is done to each file.

    Attributes:
        split_scenes: each scene of a clip becomes a clip.
        extract_frames: so many images are made of each clip, or of each of its scenes, in its place.
        max_side: longest side in pixels of what is written.
        strip_bars: black bars are cut off.
    """

    split_scenes: bool = False
    extract_frames: int | None = None
    max_side: int | None = None
    strip_bars: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """How an image or frame is cropped and scaled down.

    Attributes:
        before: width and height of the image.
        box: left, top, right and bottom of what is kept.
        size: width and height of the result.
    """

    before: tuple[int, int]
    box: Box
    size: tuple[int, int]

    @classmethod
    def of(cls, before: tuple[int, int], box: Box | None, max_side: int | None, *, step: int = 1) -> "Fit":
        """Fit an image.

        Args:
            box: what is kept; None is all.
            step: the sides of the result are multiples of it.
        """
        left, top, right, bottom = box or (0, 0, *before)
        width, height = right - left, bottom - top
        scale = min(1.0, (max_side or max(width, height)) / max(width, height))
        if scale < 1:
            width, height = (max(step, round(side * scale / step) * step) for side in (width, height))
        else:  # a line less is better than one more pixel that is made up
            width, height = (max(step, side // step * step) for side in (width, height))
            right, bottom = min(right, left + width), min(bottom, top + height)
        return cls(before, (left, top, right, bottom), (width, height))

    @property
    def is_whole(self) -> bool:
        """Whether the image stays as it is."""
        return self.box == (0, 0, *self.before) and self.size == self.before

    def apply(self, image: Image.Image) -> Image.Image:
        """Crop an image, and scale it by Lanczos."""
        kept = image if self.box == (0, 0, *image.size) else image.crop(self.box)
        return kept if kept.size == self.size else kept.resize(self.size, Image.Resampling.LANCZOS)


def result_suffix(path: Path) -> str:
    """Suffix of an image that is changed: a JPEG stays one, anything else becomes a PNG."""
    return path.suffix if path.suffix.lower() in _JPEG_SUFFIXES else ".png"


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
