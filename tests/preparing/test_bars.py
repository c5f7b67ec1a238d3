"""Black bars are found to the pixel, and dark images are left as they are."""

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from diffsynth_lite.preparing.bars import black_bars, common_bars

WIDTH, HEIGHT = 320, 180


def scene(width: int = WIDTH, height: int = HEIGHT, *, seed: int = 0, brightness: float = 1.0) -> Image.Image:
    """An image of soft colours, as a photo has them."""
    noise = np.random.default_rng(seed).integers(30, 256, (height // 12 + 1, width // 12 + 1, 3))
    small = Image.fromarray((noise * brightness).astype(np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def framed(
    image: Image.Image, left: int, top: int, right: int, bottom: int, *, level: int = 0
) -> Image.Image:
    """An image with bars of this depth at its edges."""
    size = (left + image.width + right, top + image.height + bottom)
    whole = Image.new("RGB", size, (level, level, level))
    whole.paste(image, (left, top))
    return whole


@pytest.mark.parametrize(
    ("bars", "level"),
    [
        ((0, 30, 0, 30), 0),
        ((60, 0, 60, 0), 0),
        ((40, 24, 40, 24), 0),
        ((0, 30, 0, 31), 16),
        ((0, 0, 0, 12), 0),
    ],
)
def test_bars_are_cut_to_the_pixel(bars, level):
    left, top, _, _ = bars
    assert black_bars(framed(scene(), *bars, level=level)) == (left, top, left + WIDTH, top + HEIGHT)


@pytest.mark.parametrize("quality", [50, 75, 95])
def test_bars_of_a_jpeg_are_cut_with_the_blocks_that_ring(quality):
    file = io.BytesIO()
    framed(scene(), 0, 30, 0, 30).save(file, "JPEG", quality=quality)
    left, top, right, bottom = black_bars(Image.open(file))
    assert (left, right) == (0, WIDTH)
    assert top in (30, 31)
    assert bottom in (HEIGHT + 29, HEIGHT + 30)


def test_bars_of_a_dim_scene_are_found():
    assert black_bars(framed(scene(brightness=0.4), 0, 30, 0, 30)) == (0, 30, WIDTH, HEIGHT + 30)


def night() -> Image.Image:
    """Houses of several heights under a black sky."""
    image = Image.new("RGB", (WIDTH, HEIGHT))
    pen = ImageDraw.Draw(image)
    for place, height in enumerate((40, 70, 55, 90, 62, 35, 80, 47)):
        pen.rectangle((place * 40, HEIGHT - height, place * 40 + 39, HEIGHT), fill=(90, 80, 60))
    return image


def vignette() -> Image.Image:
    rows = np.clip(np.minimum(np.arange(HEIGHT), np.arange(HEIGHT)[::-1]) * 3 - 60, 0, 255)
    return Image.fromarray(np.repeat(rows[:, None], WIDTH, axis=1).astype(np.uint8))


def lamp() -> Image.Image:
    image = Image.new("RGB", (WIDTH, HEIGHT))
    ImageDraw.Draw(image).ellipse((110, 40, 210, 140), fill=(250, 240, 200))
    return image


def grainy() -> Image.Image:
    """A dark wall above a bright floor: dark, but not uniform."""
    wall = np.random.default_rng(0).integers(0, 21, (60, WIDTH, 3)).astype(np.uint8)
    image = scene()
    image.paste(Image.fromarray(wall), (0, 0))
    return image


def cut_out() -> Image.Image:
    image = framed(scene(), 0, 30, 0, 30).convert("RGBA")
    image.putalpha(framed(Image.new("RGB", (WIDTH, HEIGHT), "white"), 0, 30, 0, 30).convert("L"))
    return image


@pytest.mark.parametrize(
    "image",
    [
        scene(),
        Image.new("RGB", (WIDTH, HEIGHT)),
        night(),
        vignette(),
        lamp(),
        lamp().filter(ImageFilter.GaussianBlur(6)),
        grainy(),
        cut_out(),
        framed(scene(WIDTH, 20), 0, 80, 0, 80),
        framed(scene(), 0, 1, 0, 1),
        framed(scene(brightness=0.1), 0, 30, 0, 30),
        Image.new("L", (1, 1)),
    ],
)
def test_a_dark_image_is_not_eaten(image):
    assert black_bars(image) is None


def test_bars_of_a_clip_are_those_of_all_its_frames():
    frames = [
        framed(scene(seed=seed), 0, 30 + 4 * seed, 0, 30 + 4 * seed).resize((320, 240)) for seed in range(3)
    ]
    black = Image.new("RGB", (320, 240))
    assert common_bars([black, *frames]) == black_bars(frames[0])
    assert common_bars([frames[0], scene(320, 240)]) is None
    assert common_bars([black, black]) is None
