"""This file turns an image file into upright RGB pixels, and refuses files that would be read wrong."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
from PIL import ExifTags, Image, ImageColor, ImageDraw, ImageFile, ImageOps, UnidentifiedImageError, features

from diffsynth_lite.errors import UserError, is_of_the_machine
from diffsynth_lite.media import Crop

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".tif", ".tiff", ".gif")

MAX_PIXELS = 2**26
"""Largest accepted image, 8192 x 8192: a file of a few KiB can claim gigabytes of pixels."""

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", *(("AVIF",) if features.check("avif") else ()))
_GREY_16 = ("I;16", "I;16B", "I")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", *_GREY_16)
_OUT_OF_MEMORY = ImageFile.ERRORS[-9]  # Pillow's text in an OSError without a number
_NEARER_WHITE = [255 * (2 * value > 255) for value in range(256)]
_SIDEWAYS = (5, 6, 7, 8)  # the EXIF orientations that swap width and height

DECODER_ID = f"v1 Pillow {PIL.__version__.partition('.')[0]}"
"""Everything that decides pixels besides a file's bytes; part of cache keys, so change it with the code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFacts:
    """Size of an image as it is shown, in pixels."""

    width: int
    height: int


def check_image(path: Path) -> ImageFacts:
    """Check the header of an image file without decoding it."""
    with _opened(path) as image:
        # The size of a TIFF is the upright one already.
        sideways = image.format != "TIFF" and _exif(image).get(ExifTags.Base.Orientation) in _SIDEWAYS
        width, height = reversed(image.size) if sideways else image.size
        return ImageFacts(width=width, height=height)


def load_image(path: Path, *, background: str) -> Image.Image:
    """Decode an image strictly: as it is shown, as RGB with 8 bits a channel.

    Args:
        path: PNG, JPEG, WebP, AVIF, TIFF, BMP, or GIF, of which the first frame is taken.
        background: colour that shows through where the image is transparent: a name or "#rrggbb".
    """
    try:
        colour = ImageColor.getrgb(background)[:3]
    except ValueError as error:
        raise UserError(f"background: {background!r} is not a colour; give a name or #rrggbb") from error
    return _decoded(path, lambda image: _over(image, colour))


def load_upright(path: Path) -> Image.Image:
    """Decode an image strictly: as it is shown, with 8 bits a channel, with its transparency and profile."""
    return _decoded(path, lambda image: image)


def load_thumbnail(path: Path, *, side: int) -> Image.Image:
    """A small RGB image of a file, as it is shown over white, of at most ``side`` pixels a side.

    A JPEG is decoded at the next larger size that costs less, and what was decoded is not verified.
    """
    with _opened(path) as image:
        image.draft("RGB", (side, side))
        if image.mode in ("L", "RGB", "RGBA", "CMYK"):
            # At once, as each further step copies what it gets; other modes cannot be scaled as they are.
            image.thumbnail((side, side), reducing_gap=2)
        small = _over(ImageOps.exif_transpose(_with_8_bits(image)), (255, 255, 255))
    small.thumbnail((side, side))
    return small


def load_layer(path: Path) -> Image.Image:
    """Decode a layer strictly: as RGBA with 8 bits a channel, opaque where the file has no transparency.

    Invisible pixels are black, as any resizing would make them.
    """

    def as_layer(image: Image.Image) -> Image.Image:
        rgba = image.convert("RGBA") if image.has_transparency_data else image.convert("RGB").convert("RGBA")
        hidden = rgba.getchannel("A").point(lambda alpha: 255 * (alpha == 0))
        rgba.paste((0, 0, 0, 0), mask=hidden)
        return rgba

    return _decoded(path, as_layer)


def load_mask(path: Path, *, white: str = "what counts in the loss") -> Image.Image:
    """Decode a mask strictly: mode "L", 255 for the chosen part, 0 for the rest.

    Colours become grey, and transparency black.

    Args:
        white: the meaning of white, for messages.
    """
    mask = _decoded(path, lambda image: _over(image, (0, 0, 0))).convert("L")
    if mask.getextrema() == (0, 0):
        raise UserError(f"{path}: a mask that is black all over; white is {white}")
    return mask


def black_or_white(mask: Image.Image) -> Image.Image:
    """A mask in mode "L" of 0 and 255 only, as the mask processors of diffusers' pipelines binarize it."""
    return mask.point(_NEARER_WHITE)


def random_mask(width: int, height: int, draw: np.random.Generator) -> Image.Image:
    """A mask like those that people paint: mode "L", 255 where an image is regenerated, 0 elsewhere.

    In one of eight cases that is the whole image, in one of eight a band along an edge (outpainting), else
    one to three rectangles and ellipses, each of 0.2 to 0.7 of the sides.
    """
    mask = Image.new("L", (width, height))
    pen, case = ImageDraw.Draw(mask), int(draw.integers(8))
    if case == 0:
        return Image.new("L", (width, height), 255)
    if case == 1:
        depth, edge = draw.uniform(0.15, 0.5), int(draw.integers(4))
        boxes = ((0, 0, depth, 1), (1 - depth, 0, 1, 1), (0, 0, 1, depth), (0, 1 - depth, 1, 1))
        pen.rectangle(_in_pixels(boxes[edge], width, height), fill=255)
        return mask
    for _ in range(int(draw.integers(1, 4))):
        (x, y), (across, down) = draw.uniform(0, 1, 2), draw.uniform(0.1, 0.35, 2)
        shape = pen.ellipse if draw.integers(2) else pen.rectangle
        shape(_in_pixels((x - across, y - down, x + across, y + down), width, height), fill=255)
    return mask


def _in_pixels(box: tuple[float, float, float, float], width: int, height: int) -> tuple[int, int, int, int]:
    """Corners of a box in parts of an image, the lower right one a pixel inside of it."""
    left, top, right, bottom = (
        round(side * pixels) for side, pixels in zip(box, (width, height) * 2, strict=True)
    )
    return left, top, max(left, right - 1), max(top, bottom - 1)


def cover(image: Image.Image, width: int, height: int, *, x: float = 0.5, y: float = 0.5) -> Image.Image:
    """Resize (Lanczos) to cover ``width`` x ``height`` pixels, and crop the surplus.

    Args:
        image: RGB image, RGBA layer or "L" mask.
        x: in [0, 1], position of the crop in the surplus width: 0 at the left, 0.5 in the middle.
        y: in [0, 1], its position in the surplus height: 0 at the top.
    """
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS, centering=(x, y))


def crop_of(size: tuple[int, int], width: int, height: int, *, x: float, y: float) -> Crop:
    """The area of an image that :func:`cover` keeps, in whole pixels."""
    original_width, original_height = size
    scale = max(width / original_width, height / original_height)
    return Crop(
        original_width=original_width,
        original_height=original_height,
        left=round((original_width * scale - width) * x),
        top=round((original_height * scale - height) * y),
    )


def _decoded(path: Path, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """The converted image, upright; ``convert`` gets it with its transparency."""
    with _opened(path) as image:
        image.verify()  # the checksums of a PNG, which decoding passes over; it spends the opened image
    with _opened(path) as image:
        _exif(image)  # kept by the image, so that its size is the one of `check_image`
        return convert(ImageOps.exif_transpose(_with_8_bits(image)))


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open ``path`` with its header checked; an error of the decoder becomes a UserError naming the file.

    Raises:
        MemoryError: there was too little for the pixels; the file may be good.
        OSError: the machine failed to read the file, which may be good.
    """
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("error", UserWarning)  # "Truncated File Read", "Corrupt EXIF data"
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower
            image = Image.open(file, formats=_FORMATS)
            _check_header(image)
            yield image
    except UnidentifiedImageError as error:
        raise UserError(f"{path}: not a PNG, JPEG, WebP, AVIF, TIFF, GIF or BMP image") from error
    except Image.DecompressionBombError as error:  # Pillow's own limit, of which it knows before us
        raise UserError(f"{path}: at most {MAX_PIXELS} pixels in all are read: scale it down") from error
    except Exception as error:  # decoders raise anything: TypeError was seen for a damaged EXIF block
        if is_of_the_machine(error):
            error.add_note(f"while {path} was read")
            raise
        if _OUT_OF_MEMORY in str(error):
            raise MemoryError(f"{path}: {error}") from error
        raise UserError(f"{path}: {' '.join(str(error).split()) or type(error).__name__}") from error


def _check_header(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(
            f"{image.width} x {image.height} pixels; at most {MAX_PIXELS} in all are read: scale it down"
        )
    if image.mode not in _MODES or not _has_known_range(image):
        raise ValueError(f"pixels of kind {image.mode!r} have no agreed range; save it with 8 bits a channel")
    # A JPEG with several images (MPO, from phones) has a main one, its first. An animation has none, but
    # the first frame of a GIF is shown for it where nothing moves.
    if image.format not in ("MPO", "GIF") and getattr(image, "is_animated", False):
        raise ValueError("animated, or of several pages; save the one that is meant as an image of its own")


def _has_known_range(image: Image.Image) -> bool:
    """Whether values are from 0 for black to 255, or to 65535: Pillow takes other TIFFs as they are."""
    if image.format != "TIFF" or image.mode not in _GREY_16:
        return True
    tags = image.getexif()
    return (
        image.mode != "I"
        and tags.get(ExifTags.Base.BitsPerSample) in (16, (16,))
        and tags.get(ExifTags.Base.PhotometricInterpretation) == 1
    )


def _exif(image: Image.Image) -> Image.Exif:
    """EXIF of the header; the method of a PNG would decode all pixels to look for more after them."""
    return Image.Image.getexif(image)


def _with_8_bits(image: Image.Image) -> Image.Image:
    """The image, or where it is grey with 16 bits (the range of a PNG is 0 to 65535) its nearest with 8."""
    if image.mode not in _GREY_16:
        return image
    values = np.asarray(image).astype(np.uint32)
    grey = Image.fromarray(((values + 128) // 257).astype(np.uint8))
    if (transparent := image.info.get("transparency")) is not None:
        grey.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype(np.uint8)))
    grey.info["exif"] = image.getexif().tobytes()
    return grey


def _over(image: Image.Image, background: tuple[int, ...]) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, (*background, 255)), rgba).convert("RGB")
