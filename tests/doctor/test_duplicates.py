"""Which images count as alike, on drawings and on the same drawing after what people do to images."""

import io

from messy_data import scene
from PIL import Image, ImageEnhance

from diffsynth_lite.doctor.images import equal_files, near_duplicates, perceptual_hash


def as_jpeg(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=60)
    return Image.open(file).convert("RGB")


def test_copies_that_were_scaled_compressed_or_brightened_are_alike() -> None:
    original = scene(0, (120, 90))
    images = {
        "original": original,
        "other": scene(1),
        "smaller": original.resize((60, 45), Image.Resampling.LANCZOS),
        "jpeg": as_jpeg(original),
        "brighter": ImageEnhance.Brightness(original).enhance(1.02),
    }
    looks = {name: perceptual_hash(image) for name, image in images.items()}
    assert near_duplicates(looks) == [["original", "smaller", "jpeg", "brighter"]]


def test_of_two_hundred_scenes_no_two_are_alike() -> None:
    assert near_duplicates({str(seed): perceptual_hash(scene(seed)) for seed in range(200)}) == []


def test_drawings_that_differ_only_in_colour_are_not_alike() -> None:
    shapes = {colour: Image.new("RGB", (64, 64), "black") for colour in ("red", "blue", "maroon")}
    for colour, image in shapes.items():
        image.paste(Image.new("RGB", (32, 32), colour), (16, 16))
    looks = {colour: perceptual_hash(image) for colour, image in shapes.items()}
    assert looks["red"].bits == looks["maroon"].bits
    assert near_duplicates(looks) == []


def test_many_copies_of_one_image_are_one_group() -> None:
    look = perceptual_hash(scene(3))
    assert near_duplicates({str(number): look for number in range(1000)}) == [[str(n) for n in range(1000)]]


def test_equal_files_are_grouped_by_their_content() -> None:
    assert equal_files({"a": "1", "b": "2", "c": "1", "d": "3"}) == [["a", "c"]]
