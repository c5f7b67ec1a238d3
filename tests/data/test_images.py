import random
import resource
import warnings

import numpy as np
import pytest
from image_corpus import (
    ACCEPTED,
    BAD_BODIES,
    BAD_HEADERS,
    RAMP_16,
    SIDE,
    grey_16,
    noise_image,
    plain,
    png,
    save,
)
from image_corpus import with_orientation as oriented
from media_verdicts import assert_image
from PIL import Image, ImageOps

from diffsynth_lite.data.images import (
    ImageFacts,
    check_image,
    cover,
    crop_of,
    load_image,
    load_layer,
    load_mask,
    load_thumbnail,
)
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Crop


def pixel(image, x, y):
    return image.getpixel((x, y))


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
def test_every_accepted_kind_becomes_rgb(tmp_path, suffix, mode):
    path = tmp_path / f"image.{suffix}"
    noise_image(mode).save(path)
    assert check_image(path) == ImageFacts(width=40, height=30)
    image = load_image(path, background="white")
    assert (image.mode, image.size) == ("RGB", (40, 30))
    small = load_thumbnail(path, side=20)
    assert (small.mode, small.size) == ("RGB", (20, 15))
    # It is for people: scaled before it is converted, and of 256 shades.
    assert np.abs(np.mean(small, (0, 1)) - np.mean(image, (0, 1))).max() < 4


@pytest.mark.filterwarnings("ignore")  # as outside of tests, so that only the loader itself is strict
@pytest.mark.parametrize("name", [*ACCEPTED, *BAD_HEADERS, *BAD_BODIES])
def test_an_odd_image_has_the_right_pixels_and_a_bad_one_is_refused_by_name(tmp_path, name):
    path = tmp_path / name
    path.write_bytes((ACCEPTED | BAD_HEADERS | BAD_BODIES)[name][0])
    assert_image(path)


def test_grey_of_16_bits_keeps_its_whole_range(tmp_path):
    path = tmp_path / "grey.png"
    path.write_bytes(grey_16(RAMP_16))
    shown = np.asarray(load_image(path, background="white"))
    assert np.array_equal(shown[..., 0], np.round(RAMP_16 / 257).astype(np.uint8))
    assert np.array_equal(shown[..., 0], shown[..., 2])


@pytest.mark.parametrize("background", ["no colour", "", "#12"])
def test_a_background_that_is_no_colour_is_refused(tmp_path, background):
    path = tmp_path / "image.png"
    noise_image().save(path)
    with pytest.raises(UserError, match=f"background: '{background}' is not a colour"):
        load_image(path, background=background)


def test_pixels_without_alpha_are_kept(tmp_path):
    path = tmp_path / "image.png"
    noise_image().save(path)
    assert np.array_equal(load_image(path, background="red"), noise_image())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_size_and_the_pixels_are_those_of_the_upright_image(tmp_path, orientation):
    for name in ("a.png", "b.jpg", "c.webp", "d.tiff", "e.avif"):
        image = noise_image()
        image.save(tmp_path / name, exif=oriented(orientation))
        shown = load_image(tmp_path / name, background="white")
        with Image.open(tmp_path / name) as reference:
            assert np.array_equal(shown, ImageOps.exif_transpose(reference))
        assert np.array_equal(load_thumbnail(tmp_path / name, side=40), shown)
        facts = check_image(tmp_path / name)
        assert (facts.width, facts.height) == shown.size == ((40, 30) if orientation < 5 else (30, 40))


def test_grey_of_16_bits_is_turned_as_well(tmp_path):
    for path in (tmp_path / "grey.png", tmp_path / "grey.tiff"):
        Image.fromarray(np.arange(32, dtype=np.uint16).reshape(4, 8) * 2056).save(path, exif=oriented(6))
        shown = np.asarray(load_image(path, background="white"))[..., 0]
        assert np.array_equal(shown, np.rot90(np.arange(32).reshape(4, 8) * 8, -1))


def test_the_crop_is_in_whole_pixels_of_the_resized_image():
    def crop_at(size, x=0.5, y=0.5):
        return crop_of(size, 64, 64, x=x, y=y)

    assert crop_at((256, 128), x=0.8) == Crop(original_width=256, original_height=128, left=51)
    assert crop_at((20, 30), y=0.3) == Crop(original_width=20, original_height=30, top=10)  # enlarged
    assert crop_at((333, 333)) == Crop(original_width=333, original_height=333)
    # In the middle of a square, as diffusers' training script has it.
    for width, height in [(100, 80), (81, 100), (640, 427)]:
        crop, scale = crop_at((width, height)), 64 / min(width, height)
        assert (crop.left, crop.top) == (round((width * scale - 64) / 2), round((height * scale - 64) / 2))


def test_cover_resizes_and_crops_at_the_given_place():
    image = noise_image(size=(120, 40))
    whole = image.resize((60, 20), Image.Resampling.LANCZOS)
    for x, left in [(0.0, 0), (0.5, 20), (1.0, 40)]:
        assert np.array_equal(cover(image, 20, 20, x=x), whole.crop((left, 0, left + 20, 20)))
        crop = Crop(original_width=120, original_height=40, left=left)
        assert crop_of(image.size, 20, 20, x=x, y=0.5) == crop
    tall = image.transpose(Image.Transpose.ROTATE_90)
    lowest = tall.resize((20, 60), Image.Resampling.LANCZOS).crop((0, 40, 20, 60))
    assert np.array_equal(cover(tall, 20, 20, y=1.0), lowest)
    assert np.array_equal(cover(image, 120, 40), image)
    assert cover(image.convert("L"), 33, 7).mode == "L"


def test_the_first_image_of_a_phone_jpeg_is_taken(tmp_path):
    path = tmp_path / "phone.jpg"
    Image.new("RGB", (8, 8), "red").save(
        path, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")]
    )
    assert pixel(load_image(path, background="white"), 4, 4)[0] > 200


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (plain(200, "L"), 200),
        (plain(1, "1"), 255),
        (plain("white"), 255),
        (plain((255, 255, 255, 128), "RGBA"), 128),
        (plain((255, 102), "LA"), 102),
        (plain("white").convert("P"), 255),
    ],
)
def test_masks_become_grey_and_what_is_transparent_does_not_count(tmp_path, image, expected):
    path = tmp_path / "mask.png"
    image.save(path)
    mask = load_mask(path)
    assert (mask.mode, mask.size, mask.getextrema()) == ("L", (8, 8), (expected, expected))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (plain((10, 20, 30, 128), "RGBA"), (10, 20, 30, 128)),
        (plain((10, 20, 30, 0), "RGBA"), (0, 0, 0, 0)),  # what is not seen is nothing
        (plain((200, 102), "LA"), (200, 200, 200, 102)),
        (plain("red"), (255, 0, 0, 255)),
        (plain("red").convert("P"), (255, 0, 0, 255)),
        (plain(7, "L"), (7, 7, 7, 255)),
    ],
)
@pytest.mark.parametrize("suffix", ["png", "webp"])
def test_layers_keep_their_transparency(tmp_path, image, expected, suffix):
    path = tmp_path / f"layer.{suffix}"
    image.save(path, lossless=True, exact=True)
    layer = load_layer(path)
    assert (layer.mode, layer.size) == ("RGBA", (8, 8))
    assert np.unique(np.asarray(layer).reshape(-1, 4), axis=0).tolist() == [list(expected)]


@pytest.mark.parametrize("image", [plain(0, "L"), plain((255, 255, 255, 0), "RGBA")])
def test_a_mask_in_which_nothing_counts_is_refused(tmp_path, image):
    path = tmp_path / "mask.png"
    image.save(path)
    with pytest.raises(UserError, match=r"mask\.png: a mask that is black all over"):
        load_mask(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.png"):
        check_image(tmp_path / "gone.png")


def test_the_largest_accepted_size_passes_the_header_check(tmp_path):
    path = tmp_path / "large.png"
    path.write_bytes(png(SIDE, SIDE))
    assert check_image(path) == ImageFacts(width=SIDE, height=SIDE)


@pytest.mark.parametrize("name", ["above_our_limit.png", "bomb.png"])
def test_a_decompression_bomb_takes_no_memory(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(BAD_HEADERS[name][0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5):
        with pytest.raises(UserError):
            load_image(path, background="white")
    assert (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000
    )  # KiB; the image: 200 MB or more


@pytest.mark.parametrize("suffix", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF"])
def test_random_damage_gives_an_image_or_a_user_error(tmp_path, suffix):
    content = save(noise_image(), suffix, **({} if suffix in ("BMP", "GIF") else {"exif": oriented(6)}))
    path = tmp_path / "damaged"
    draw = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(draw.choice([1, 3, 20])):
            damaged[draw.randrange(min(len(damaged), draw.choice([150, 10**9])))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            assert load_image(path, background="white").size[0] > 0
        except UserError:
            refused += 1
    assert refused > 10


def test_warning_filters_are_as_before(tmp_path):
    path = tmp_path / "image.png"
    noise_image().save(path)
    before = list(warnings.filters)
    load_image(path, background="white")
    assert warnings.filters == before
