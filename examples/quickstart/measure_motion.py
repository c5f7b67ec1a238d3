"""How well the direction in which a generated shape moves agrees with the one that the caption names."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from measure import find_foreground
from motions import DIRECTIONS, MovingScene
from PIL import Image

MIN_MOTION = 4.0
"""Pixels; a shape that moves less over the clip is called still."""


@dataclass(frozen=True)
class MotionReading:
    """What one clip shows.

    How far the shape moves right and down from the first frame to the last, in pixels; the cosine of the
    angle to the named direction; the nearest of the five, or "still"; and whether that is the named one.
    """

    motion: tuple[float, float]
    cosine: float
    nearest: str
    right: bool


@dataclass(frozen=True)
class MotionScore:
    """Share of clips whose nearest direction is the named one (0 to 1), mean cosine, mean pixels moved."""

    accuracy: float
    cosine: float
    pixels: float


def shape_centre(image: Image.Image) -> np.ndarray:
    """Where the shape is, (2,), pixels from the left and from the top; the middle if there is no shape."""
    foreground = find_foreground(np.asarray(image.convert("RGB"), dtype=float))
    if not foreground.any():
        return np.array(image.size) / 2
    rows, columns = np.nonzero(foreground)
    return np.array([columns.mean() + 0.5, rows.mean() + 0.5])


def read_clip(frames: Sequence[Image.Image], direction: str) -> MotionReading:
    """Compare the motion from the first frame to the last with the direction that the caption names."""
    motion = shape_centre(frames[-1]) - shape_centre(frames[0])
    pixels = float(np.linalg.norm(motion))
    cosines = {
        name: float(motion @ np.array(wanted) / (np.linalg.norm(wanted) * max(pixels, 1e-6)))
        for name, wanted in DIRECTIONS.items()
    }
    nearest = max(cosines, key=lambda name: cosines[name]) if pixels >= MIN_MOTION else "still"
    right, down = (round(float(part), 1) for part in motion)
    return MotionReading((right, down), round(cosines[direction], 3), nearest, nearest == direction)


def read_clips(clips: Sequence[Sequence[Image.Image]], scenes: Sequence[MovingScene]) -> list[MotionReading]:
    """One reading a clip."""
    return [read_clip(frames, scene.direction) for frames, scene in zip(clips, scenes, strict=True)]


def summarise_motion(readings: Sequence[MotionReading]) -> MotionScore:
    """Mean over the readings."""
    return MotionScore(
        accuracy=float(np.mean([reading.right for reading in readings])),
        cosine=round(float(np.mean([reading.cosine for reading in readings])), 2),
        pixels=round(float(np.mean([np.linalg.norm(reading.motion) for reading in readings])), 1),
    )
