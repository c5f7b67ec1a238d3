"""This file turns an image file into RGB pixels of the training size, and refuses what would go in wrong."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from diffsynth_lite.errors import UserError

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")

MAX_PIXELS = 2**26
"""Largest accepted image, 8192 x 8192: a file of a few KiB can claim gigabytes of pixels."""

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")


def check_image(path: Path) -> tuple[int, int]:
    """Check the header of an image file without decoding it.

    Returns:
        Width and height in pixels as stored, before the rotation that EXIF asks for.

    Raises:
        UserError: the format, the size or the kind of pixels cannot be used.
    """
    with _opened(path) as image:
        return image.size


def load_image(path: Path, *, width: int, height: int) -> Image.Image:
    """Decode an image strictly and bring it to exactly ``width`` x ``height`` RGB pixels.

    EXIF rotation is applied, transparency is laid over white, and the image is resized (Lanczos) to cover
    the target and cropped at its centre.

    Raises:
        UserError: the file cannot be used, or is damaged in any part.
    """
    with _opened(path) as image:
        image.verify()  # the checksums of a PNG, which decoding passes over; it spends the opened image
    with _opened(path) as image:
        upright = ImageOps.exif_transpose(image)
        return ImageOps.fit(_over_white(upright), (width, height), Image.Resampling.LANCZOS)


def image_transform_id(width: int, height: int) -> str:
    """Name of what `load_image` does to the pixels; part of a cache key, so change it with the code."""
    return f"v1 exif white lanczos-cover centre {width}x{height}"


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open ``path`` with its header checked; an error of the decoder becomes a UserError naming the file."""
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("error", UserWarning)  # "Truncated File Read", "Corrupt EXIF data"
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower
            image = Image.open(file, formats=_FORMATS)
            _check_header(image)
            yield image
    except UnidentifiedImageError as error:
        raise UserError(f"{path}: not a PNG, JPEG, WebP or BMP image") from error
    except Exception as error:  # decoders raise anything: TypeError was seen for a damaged EXIF block
        raise UserError(f"{path}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _check_header(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"{image.width} x {image.height} pixels; at most {MAX_PIXELS} in all are read: scale it down"
        )
    if image.mode not in _MODES:
        raise ValueError(f"pixels of kind {image.mode!r} have no agreed range; save it with 8 bits a channel")
    # A JPEG with several pictures (MPO, from phones) has a main one, its first; an animation has none.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise ValueError("animated; save the frame that is meant as an image of its own")


def _over_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
