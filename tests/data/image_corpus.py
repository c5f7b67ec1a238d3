"""Odd and bad image files: the bytes of each, and what must become of it."""

import io
import struct
import zlib

import numpy as np
from PIL import ExifTags, Image

from diffsynth_lite.data.images import MAX_PIXELS

SIDE = int(MAX_PIXELS**0.5)
RAMP_16 = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1040
"""Grey from 0 to 65520."""


def noise_image(mode="RGB", size=(40, 30)):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def plain(colour, mode="RGB", size=(8, 8)):
    return Image.new(mode, size, colour)


def save(image, kind, **options):
    content = io.BytesIO()
    image.save(content, kind, **options)
    return content.getvalue()


def png(width, height, *, bits=8, colour_type=2, rows=None, chunks=b""):
    """A PNG put together by hand; without ``rows`` it has far too few pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, colour_type, 0, 0, 0)
    pixels = zlib.compress(bytes(1000) if rows is None else b"".join(b"\0" + row for row in rows))
    extra = chunk(b"tRNS", chunks) if chunks else b""
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def animation(kind):
    return save(plain("red"), kind, save_all=True, append_images=[plain("blue")])


def with_orientation(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def rgb_16(red, green, blue):
    return png(8, 8, bits=16, rows=[struct.pack(">HHH", red, green, blue) * 8] * 8)


def grey_16(values, transparent=None):
    rows = [struct.pack(f">{len(row)}H", *row) for row in values.tolist()]
    chunks = b"" if transparent is None else struct.pack(">H", transparent)
    return png(values.shape[1], values.shape[0], bits=16, colour_type=0, rows=rows, chunks=chunks)


def grey_tiff(**tags):
    """A TIFF of 16-bit grey 40000, whatever its tags say."""
    content = save(Image.fromarray(np.full((8, 8), 40000, dtype=np.uint16)), "TIFF")
    for name, value in tags.items():
        entry = struct.pack("<HHI", getattr(ExifTags.Base, name), 3, 1)
        place = content.index(entry) + len(entry)
        content = content[:place] + struct.pack("<H", value) + content[place + 2 :]
    return content


PNG, JPEG = save(noise_image(), "PNG"), save(noise_image(), "JPEG")
BROKEN_EXIF = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"

ACCEPTED = {
    "grey16.png": (grey_16(np.full((8, 8), 40000)), (156, 156, 156)),
    "grey16_white.png": (grey_16(np.full((8, 8), 65535)), (255, 255, 255)),
    "rgb16.png": (rgb_16(65535, 32768, 0), (255, 128, 0)),
    "grey16_transparent.png": (grey_16(np.full((8, 8), 77), transparent=77), (10, 20, 30)),
    "grey16_other_transparent.png": (grey_16(np.full((8, 8), 40000), transparent=77), (156, 156, 156)),
    "transparent.png": (save(plain((0, 0, 0, 0), "RGBA"), "PNG"), (10, 20, 30)),
    "grey_alpha.png": (save(plain((200, 0), "LA"), "PNG"), (10, 20, 30)),
    "half.png": (save(plain((255, 0, 0, 128), "RGBA"), "PNG"), (133, 10, 15)),
    "palette_alpha.png": (save(plain("black").convert("P"), "PNG", transparency=0), (10, 20, 30)),
    "colour_alpha.png": (save(plain("black"), "PNG", transparency=(0, 0, 0)), (10, 20, 30)),
    "alpha.webp": (save(plain((0, 0, 0, 0), "RGBA"), "WEBP", lossless=True), (10, 20, 30)),
    "one_bit.png": (save(plain(1, "1"), "PNG"), (255, 255, 255)),
    "cmyk.jpg": (save(plain((250, 20, 20)).convert("CMYK"), "JPEG", quality=100), (250, 20, 20)),
    "still.gif": (save(plain((1, 2, 3)).convert("P", palette=Image.Palette.ADAPTIVE), "GIF"), (1, 2, 3)),
    "animated.gif": (animation("GIF"), (255, 0, 0)),
    "transparent.gif": (save(plain("black").convert("P"), "GIF", transparency=0), (10, 20, 30)),
    "rgb.tif": (save(plain((1, 2, 3)), "TIFF", compression="tiff_lzw"), (1, 2, 3)),
    "half.tiff": (save(plain((255, 0, 0, 128), "RGBA"), "TIFF"), (133, 10, 15)),
    "grey16.tiff": (grey_tiff(), (156, 156, 156)),
    "half.avif": (save(plain((255, 0, 0, 128), "RGBA"), "AVIF", quality=100), (133, 10, 15)),
    "renamed_png.jpg": (save(plain((1, 2, 3)), "PNG"), (1, 2, 3)),
    "bytes_after_the_end.png": (save(plain((1, 2, 3)), "PNG") + b"more", (1, 2, 3)),
}
"""Bytes, and the colour of the middle over the background (10, 20, 30)."""

BAD_HEADERS = {
    "empty.png": (b"", "not a PNG"),
    "page.png": (b"<!DOCTYPE html><html>404</html>", "not a PNG"),
    "text.jpg": (b"this is not an image", "not a PNG"),
    "icon.png": (save(noise_image(), "ICO"), "not a PNG"),
    "float.tiff": (save(plain(0.5, "F"), "TIFF"), "no agreed range"),
    "grey32.tiff": (save(plain(9, "I"), "TIFF"), "no agreed range"),
    "grey12.tiff": (grey_tiff(BitsPerSample=12), "no agreed range"),
    "white_is_0.tiff": (grey_tiff(PhotometricInterpretation=0), "no agreed range"),
    "pages.tiff": (animation("TIFF"), "several pages"),
    "animated.avif": (animation("AVIF"), "animated"),
    "svg.png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "not a PNG"),
    "header.png": (PNG[:20], "."),
    "animated.png": (animation("PNG"), "animated"),
    "animated.webp": (animation("WEBP"), "animated"),
    "above_our_limit.png": (png(SIDE, SIDE + 1), "scale it down"),
    "above_the_warning.png": (png(10_000, 10_000), "scale it down"),
    "bomb.png": (png(60_000, 60_000), "scale it down"),
}

BAD_BODIES = {
    "truncated.png": (PNG[:-300], "truncated|broken"),
    "checksum.png": (PNG[:-14] + bytes(2) + PNG[-12:], "broken"),
    "no_end.png": (PNG[:-12], "truncated"),
    "truncated.jpg": (JPEG[:-300], "truncated"),
    "exif.jpg": (save(noise_image(), "JPEG", exif=BROKEN_EXIF), "corrupt exif"),
    "truncated.webp": (save(noise_image(), "WEBP")[:-300], "."),
    "truncated.tiff": (save(noise_image(), "TIFF", compression="tiff_lzw")[:-300], "."),
    "truncated.gif": (save(noise_image("P"), "GIF")[:-300], "truncated"),
    "truncated.avif": (save(noise_image(), "AVIF")[:-300], "."),
    "truncated.bmp": (save(noise_image(), "BMP")[:-300], "truncated"),
    "few_pixels.png": (png(400, 400), "truncated|broken"),
}
