"""Blur and black bars of images: those that were planted are found, and none in images that are good."""

from collections.abc import Callable

import numpy as np
import pytest
from messy_data import blurred, photo
from PIL import Image, ImageDraw

from diffsynth_lite.doctor.images import BLURRED, Look, sharpness

SIZE = (512, 384)


def shallow_depth_of_field() -> Image.Image:
    image = blurred(photo(), 12)
    image.paste(photo(2).crop((200, 100, 320, 240)), (200, 100))
    return image


def night() -> Image.Image:
    grain = np.abs(np.random.default_rng(3).normal(6, 3, (SIZE[1], SIZE[0], 3)))
    image = Image.fromarray(grain.clip(0, 255).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    for x, y in ((80, 200), (150, 190), (300, 210), (410, 180)):
        pen.rectangle((x, y, x + 12, y + 18), fill=(250, 220, 150))
    return image


def sketch() -> Image.Image:
    image = Image.new("RGB", SIZE, "white")
    pen = ImageDraw.Draw(image)
    pen.line((40, 300, 200, 60, 380, 310, 40, 300), fill="black", width=3)
    return image


def flat_drawing() -> Image.Image:
    image = Image.new("RGB", SIZE, (250, 240, 200))
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 250, 512, 384), fill=(60, 140, 80))
    pen.ellipse((340, 40, 440, 140), fill=(240, 120, 60))
    return image


def on_black() -> Image.Image:
    image = Image.new("RGB", SIZE, "black")
    image.paste(photo(4).crop((180, 120, 330, 260)), (180, 120))
    return image


def fog() -> Image.Image:
    return blurred(photo(), 30)


def dusk() -> Image.Image:
    """A dark sky over a dark ground, with a bright band between."""
    rows = np.interp(np.arange(SIZE[1]), [0, 120, 190, 260, 384], [2, 8, 150, 8, 2])
    ground = np.random.default_rng(5).normal(0, 3, (SIZE[1], SIZE[0], 3))
    return Image.fromarray((rows[:, None, None] + ground).clip(0, 255).astype(np.uint8))


GOOD = (photo, shallow_depth_of_field, night, sketch, flat_drawing, on_black, fog, dusk)


@pytest.mark.parametrize("image", GOOD, ids=lambda image: image.__name__)
def test_good_images_have_no_flaw(image: Callable[[], Image.Image]) -> None:
    assert Look.at([image()]).flaws == {}
    assert Look.at([image().resize((1536, 1152), Image.Resampling.LANCZOS)]).flaws == {}


@pytest.mark.parametrize("pixels", [4, 6, 8])
def test_a_blurred_photo_is_remarked(pixels: float) -> None:
    assert Look.at([blurred(photo(), pixels)]).flaws.keys() == {"blurred"}


def test_blur_is_judged_at_one_size_and_not_where_images_are_too_small_for_it() -> None:
    sharp = Image.fromarray(np.asarray(photo()).repeat(4, axis=0).repeat(4, axis=1))
    assert sharpness(photo().convert("L")) > 0.85 > BLURRED
    assert Look.at([sharp]).flaws == {}
    assert Look.at([blurred(sharp, 20)]).flaws.keys() == {"blurred"}
    assert sharpness(blurred(photo(), 4).convert("L").crop((0, 0, 255, 255))) == 1.0


def test_a_clip_is_as_sharp_as_its_sharpest_frame() -> None:
    soft = blurred(photo(), 6)
    assert Look.at([soft, soft, photo(), soft, soft]).flaws == {}
    assert Look.at([soft] * 5).flaws.keys() == {"blurred"}


@pytest.mark.parametrize("box", [(0, 48, 512, 336), (60, 0, 452, 384)])
def test_black_bars_are_remarked_with_their_part_of_the_area(box: tuple[int, int, int, int]) -> None:
    image = Image.new("RGB", SIZE, (2, 2, 2))
    image.paste(photo().crop(box), box)
    part = 1 - (box[2] - box[0]) * (box[3] - box[1]) / (512 * 384)
    assert Look.at([image]).bars == pytest.approx(part, abs=0.01)  # a pixel of the reduced image
    assert Look.at([image]).flaws == {"bars": f"black bars are {Look.at([image]).bars:.0%} of it"}


def test_bars_of_a_clip_are_in_all_its_frames() -> None:
    image = Image.new("RGB", SIZE)
    image.paste(photo().crop((0, 48, 512, 336)), (0, 48))
    assert Look.at([image] * 4).bars > 0.2
    assert Look.at([image, image, photo()]).bars == 0


def test_what_is_remembered_is_read_back() -> None:
    look = Look.at([blurred(photo(), 6)])
    again = Look.parsed(look.text)
    assert again is not None
    assert (again.flaws, again.text) == (look.flaws, look.text)
    assert Look.parsed(None) is None
