import io
import random
import struct
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from diffsynth_lite.data.images import MAX_PIXELS, check_image, image_transform_id, load_image
from diffsynth_lite.errors import UserError


def pixel(image, x, y):
    return image.getpixel((x, y))


def noise_image(mode="RGB", size=(40, 30)):
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize(
    ("suffix", "mode"),
    [
        ("png", "1"),
        ("png", "L"),
        ("png", "LA"),
        ("png", "P"),
        ("png", "RGB"),
        ("png", "RGBA"),
        ("jpg", "L"),
        ("jpg", "RGB"),
        ("jpg", "CMYK"),
        ("webp", "RGB"),
        ("webp", "RGBA"),
        ("bmp", "P"),
        ("bmp", "RGB"),
    ],
)
def test_every_accepted_kind_becomes_rgb_of_exactly_the_size_asked_for(tmp_path, suffix, mode):
    path = tmp_path / f"image.{suffix}"
    noise_image(mode).save(path)
    assert check_image(path) == (40, 30)
    image = load_image(path, width=16, height=32)
    assert (image.mode, image.size) == ("RGB", (16, 32))


def test_an_image_of_the_size_asked_for_keeps_its_pixels(tmp_path):
    path = tmp_path / "image.png"
    noise_image().save(path)
    assert np.array_equal(load_image(path, width=40, height=30), noise_image())


def test_a_large_image_is_resized_to_cover_and_cropped_at_the_centre(tmp_path):
    path = tmp_path / "wide.png"
    noise_image(size=(120, 40)).save(path)
    expected = noise_image(size=(120, 40)).resize((60, 20), Image.Resampling.LANCZOS).crop((20, 0, 40, 20))
    assert np.array_equal(load_image(path, width=20, height=20), expected)


def test_the_rotation_of_exif_comes_before_the_crop(tmp_path):
    path = tmp_path / "rotated.jpg"
    image = Image.new("RGB", (60, 20), "red")
    image.paste("blue", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees to the right: the blue end is at the top
    image.save(path, exif=exif, quality=100, subsampling=0)
    shown = load_image(path, width=20, height=60)
    assert pixel(shown, 10, 5)[2] > 200
    assert pixel(shown, 10, 55)[0] > 200


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparency_shows_white(tmp_path, mode):
    path = tmp_path / "transparent.png"
    if mode in ("RGBA", "LA"):
        Image.new("RGBA", (8, 8), (0, 0, 0, 0)).convert(mode).save(path)
    else:
        Image.new("RGB", (8, 8), (0, 0, 0)).convert(mode).save(
            path, transparency=0 if mode == "P" else (0, 0, 0)
        )
    assert pixel(load_image(path, width=8, height=8), 4, 4) == (255, 255, 255)


def test_half_transparency_mixes_with_white(tmp_path):
    path = tmp_path / "half.png"
    Image.new("RGBA", (8, 8), (255, 0, 0, 128)).save(path)
    assert pixel(load_image(path, width=8, height=8), 4, 4) == (255, 127, 127)


def test_cmyk_keeps_its_colour(tmp_path):
    path = tmp_path / "cmyk.jpg"
    Image.new("RGB", (8, 8), (250, 20, 20)).convert("CMYK").save(path, quality=95)
    red, green, blue = pixel(load_image(path, width=8, height=8), 4, 4)
    assert red > 200
    assert max(green, blue) < 60


def test_the_first_picture_of_a_phone_jpeg_is_taken(tmp_path):
    path = tmp_path / "phone.jpg"
    Image.new("RGB", (8, 8), "red").save(
        path, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")]
    )
    assert pixel(load_image(path, width=8, height=8), 4, 4)[0] > 200


def save(image, suffix, **options):
    content = io.BytesIO()
    image.save(content, suffix, **options)
    return content.getvalue()


def png_that_claims(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def animation(suffix):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    return save(frames[0], suffix, save_all=True, append_images=frames[1:])


SIDE = int(MAX_PIXELS**0.5)

BAD_HEADERS = {
    "empty.png": (b"", "not a PNG"),
    "page.png": (b"<!DOCTYPE html><html>404</html>", "not a PNG"),
    "text.jpg": (b"this is no image", "not a PNG"),
    "gif.png": (save(noise_image("P"), "GIF"), "not a PNG"),
    "tiff.png": (save(noise_image(), "TIFF"), "not a PNG"),
    "header.png": (save(noise_image(), "PNG")[:20], "."),
    "grey16.png": (save(Image.new("I;16", (8, 8), 40000), "PNG"), "'I;16'.*8 bits"),
    "animated.png": (animation("PNG"), "animated"),
    "animated.webp": (animation("WEBP"), "animated"),
    "above_our_limit.png": (png_that_claims(SIDE, SIDE + 1), "scale it down"),
    "above_the_warning.png": (png_that_claims(10_000, 10_000), "scale it down"),
    "bomb.png": (png_that_claims(60_000, 60_000), "pixels"),
}

BAD_BODIES = {
    "truncated.png": (save(noise_image(), "PNG")[:-300], "truncated|broken"),
    "checksum.png": (
        save(noise_image(), "PNG")[:-14] + bytes(2) + save(noise_image(), "PNG")[-12:],
        "broken",
    ),
    "no_end.png": (save(noise_image(), "PNG")[:-12], "truncated"),
    "truncated.jpg": (save(noise_image(), "JPEG")[:-300], "truncated"),
    "exif.jpg": (save(noise_image(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"), "corrupt exif"),
    "truncated.webp": (save(noise_image(), "WEBP")[:-300], "."),
    "truncated.bmp": (save(noise_image(), "BMP")[:-300], "truncated"),
    "few_pixels.png": (png_that_claims(400, 400), "truncated|broken"),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_the_header_alone_shows_that_a_file_cannot_be_used(tmp_path, name):
    content, reason = BAD_HEADERS[name]
    path = tmp_path / name
    path.write_bytes(content)
    for refused in (check_image, lambda path: load_image(path, width=8, height=8)):
        with pytest.raises(UserError, match=reason) as error:
            refused(path)
        assert str(error.value).startswith(f"{path}: ")
        assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore")  # as outside of tests, so that only the loader itself is strict
@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_file_that_is_damaged_further_down_is_refused_when_decoded(tmp_path, name):
    content, reason = BAD_BODIES[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"(?i){name}: .*({reason})"):
        load_image(path, width=8, height=8)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.png"):
        check_image(tmp_path / "gone.png")


def test_the_largest_accepted_size_passes_the_header_check(tmp_path):
    path = tmp_path / "large.png"
    path.write_bytes(png_that_claims(SIDE, SIDE))
    assert check_image(path) == (SIDE, SIDE)


@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "WEBP", "BMP"])
def test_random_damage_gives_an_image_or_a_user_error(tmp_path, suffix):
    exif = Image.Exif()
    exif[0x0112] = 6
    content = save(noise_image(), suffix, **({} if suffix == "BMP" else {"exif": exif}))
    path = tmp_path / "damaged"
    draw = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 3, 20])):
            damaged[draw.randrange(min(len(damaged), draw.choice([150, 10**9])))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            assert load_image(path, width=8, height=8).size == (8, 8)
        except UserError:
            refused += 1
    assert refused > 10


def test_warning_filters_are_as_before(tmp_path):
    path = tmp_path / "image.png"
    noise_image().save(path)
    before = list(warnings.filters)
    load_image(path, width=8, height=8)
    assert warnings.filters == before


def test_the_name_of_the_transform_changes_with_the_size():
    assert len({image_transform_id(8, 8), image_transform_id(8, 16), image_transform_id(16, 8)}) == 3
