"""Hard cuts are found exactly to the frame; pans, flashes, fades and titles are not cuts."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from av.video.frame import VideoFrame

from diffsynth_lite.preparing.scenes import Scene, find_scenes

WIDTH, HEIGHT, FPS = 96, 54, 24
Frames = list[np.ndarray]


def landscape(seed: int, *, width: int = WIDTH) -> np.ndarray:
    """Soft colours, wider than a frame where it is panned over."""
    small = np.random.default_rng(seed).integers(0, 256, (HEIGHT // 9, width // 8, 3)).astype(np.float64)
    rows = np.repeat(np.repeat(small, 9, axis=0), 8, axis=1)
    return (rows + np.roll(rows, 4, axis=1) + np.roll(rows, 4, axis=0)) / 3


def still(seed: int, count: int = 24) -> Frames:
    """A scene with the grain of a camera."""
    noise = np.random.default_rng(seed + 100)
    return [landscape(seed) + noise.normal(0, 4, (HEIGHT, WIDTH, 3)) for _ in range(count)]


def pan(seed: int, *, speed: int, count: int = 24) -> Frames:
    wide = landscape(seed, width=WIDTH + 8 * (speed * count // 8 + 1))
    return [wide[:, speed * index : speed * index + WIDTH] for index in range(count)]


def flashed(frames: Frames, *, at: int, count: int) -> Frames:
    return [frame / 4 + 190 if at <= index < at + count else frame for index, frame in enumerate(frames)]


def faded(one: Frames, other: Frames) -> Frames:
    """A dissolve over the length of both."""
    return [a + (b - a) * index / len(one) for index, (a, b) in enumerate(zip(one, other, strict=True))]


def on_threes(frames: Frames) -> Frames:
    """Drawn animation: each image is shown three times."""
    return [frames[index // 3 * 3] for index in range(len(frames))]


def scenes_of(images: Frames, times: Sequence[int] | None = None) -> list[Scene]:
    frames = []
    for index, image in enumerate(images):
        frame = VideoFrame.from_ndarray(np.clip(image, 0, 255).astype(np.uint8), format="rgb24")
        frame.pts, frame.time_base = times[index] if times else index, Fraction(1, FPS)
        frames.append(frame)
    duration_s = (times[-1] + 1 if times else len(images)) / FPS
    scenes = find_scenes(frames, duration_s)
    assert sum(scene.num_frames for scene in scenes) == len(images)
    assert scenes[-1].start_s + scenes[-1].duration_s == pytest.approx(duration_s)
    assert [scene.start_s for scene in scenes] == [
        (times or range(999))[scene.first] / FPS for scene in scenes
    ]
    return scenes


def bounds(images: Frames) -> list[int]:
    """Indexes of the first frames of the scenes after the first."""
    return [scene.first for scene in scenes_of(images)[1:]]


@pytest.mark.parametrize(
    ("frames", "cuts"),
    [
        (still(0) + still(1) + still(2, 13), [24, 48]),
        (still(0) + still(1, 8) + still(2), [24, 32]),
        (pan(0, speed=3) + pan(1, speed=3), [24]),
        (still(0) + pan(1, speed=3), [24]),
        (on_threes(pan(0, speed=1, count=27)) + on_threes(pan(1, speed=1, count=27)), [27]),
        ([frame * 0.25 for frame in still(0) + still(1)], [24]),
        (faded(still(0), still(1)) + still(2), [24]),
    ],
)
def test_hard_cuts_are_found_to_the_frame(frames: Frames, cuts: list[int]) -> None:
    assert bounds(frames) == cuts


@pytest.mark.parametrize(
    "frames",
    [
        still(0, 48),
        pan(0, speed=12, count=48),
        still(0) + pan(0, speed=8),
        on_threes(pan(0, speed=2, count=48)),
        flashed(still(0, 48), at=20, count=1),
        flashed(still(0, 48), at=20, count=4),
        flashed(pan(0, speed=1, count=48), at=20, count=5),
        faded(still(0), still(1)),
        [frame * min(1, index / 10) for index, frame in enumerate(still(0, 48))],
        [landscape(0)],
    ],
)
def test_what_is_not_a_cut_cuts_nothing(frames: Frames) -> None:
    assert bounds(frames) == []


def test_a_scene_is_short_below_half_a_second_by_the_clock() -> None:
    def are_short(first: int, times: Sequence[int] | None = None) -> list[bool]:
        return [scene.is_short for scene in scenes_of(still(0, first) + still(1, 20), times)]

    assert are_short(11) == [True, False]
    assert are_short(12) == [False, False]
    assert are_short(8, range(0, 56, 2)) == [False, False]
    assert are_short(20, [*range(0, 40, 2), *range(40, 60)]) == [False, False]
