"""Ways in which media may be damaged, and the verdict on an image or clip of the corpus."""

import random
from pathlib import Path

import numpy as np
import pytest
from clip_corpus import Accepted, Refused
from clip_makers import decode_all, index_shown
from image_corpus import ACCEPTED, BAD_BODIES, BAD_HEADERS

from diffsynth_lite.data.images import check_image, load_image, load_mask
from diffsynth_lite.data.video import check_video, read_frames
from diffsynth_lite.errors import UserError


def assert_image(path: Path) -> None:
    """A file with the name and content of one of the corpus is accepted or refused as it says."""
    if path.name in ACCEPTED:
        _assert_colour(path)
    elif path.name in BAD_HEADERS:
        for read in (check_image, lambda path: load_image(path, background="white"), load_mask):
            with pytest.raises(UserError, match=BAD_HEADERS[path.name][1]) as error:
                read(path)
            assert str(error.value).startswith(f"{path}: ")
            assert "\n" not in str(error.value)
    else:
        reason = BAD_BODIES[path.name][1]
        with pytest.raises(UserError, match=f"(?i){path.name}: .*({reason})"):
            load_image(path, background="white")


def _assert_colour(path: Path) -> None:
    shown = np.asarray(load_image(path, background="#0a141e")).astype(int)
    tolerance = 8 if path.suffix in (".jpg", ".avif") and "renamed" not in path.name else 0
    assert np.abs(shown - ACCEPTED[path.name][1]).max() <= tolerance


def assert_clip(path: Path, expected: Accepted | Refused) -> None:
    """A clip of the corpus is read frame by frame, or refused by name with its reason."""
    if isinstance(expected, Accepted):
        _assert_frames(path, expected)
        return
    with pytest.raises(UserError) as error:
        check_video(path)
    assert expected.reason in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def _assert_frames(path: Path, expected: Accepted) -> None:
    facts = check_video(path)
    assert facts.fps == pytest.approx(expected.fps, rel=1e-12)
    assert (facts.width, facts.height) == expected.size
    assert facts.num_frames == len(expected.shown)
    seconds = expected.seconds or len(expected.shown) / expected.fps
    assert facts.duration_s == pytest.approx(seconds, abs=0.001)
    assert facts.is_variable_rate == expected.is_variable_rate
    times = [float(time) for time, _ in decode_all(path)]
    images = read_frames(path, times)
    assert [index_shown(image) for image in images] == expected.shown
    assert {(image.mode, image.size) for image in images} == {("RGB", expected.size)}


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The bytes of a file, damaged in one place."""
    data = bytearray(content)
    at, length = draw.randrange(len(data)), draw.choice([1, 10, 200])
    kind = draw.choice(["truncate", "bytes", "zero", "drop", "insert"])
    if kind == "truncate":
        del data[at:]
    elif kind == "drop":
        del data[at : at + length]
    elif kind == "insert":
        data[at:at] = draw.randbytes(length)
    else:
        patch = bytes(length) if kind == "zero" else draw.randbytes(length)
        data[at : at + length] = patch[: len(data) - at]
    return bytes(data)
