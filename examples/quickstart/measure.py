"""How close the colour of a generated shape is to the colour that the caption names."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from shapes import COLOURS, Scene

BORDER = 3  # pixels along the edge that show the ground only


@dataclass(frozen=True)
class Reading:
    """What one image shows: the shape's colour (0 to 255 each), its distance to the named one, its name."""

    rgb: tuple[float, float, float]
    distance: float
    nearest: str
    right: bool


@dataclass(frozen=True)
class Score:
    """Share of images whose nearest colour is the named one (0 to 1), and mean RGB distance (0 to 441)."""

    accuracy: float
    distance: float


def shape_colour(image: Image.Image) -> np.ndarray:
    """Median RGB of the foreground, (3,), 0 to 255; an image without one gives the mean of its centre."""
    pixels = np.asarray(image.convert("RGB"), dtype=float)
    foreground = find_foreground(pixels)
    if foreground.any():
        return np.median(pixels[foreground], axis=0)
    height, width = foreground.shape
    centre = pixels[height // 2 - 4 : height // 2 + 4, width // 2 - 4 : width // 2 + 4]
    return centre.mean(axis=(0, 1))


def find_foreground(pixels: np.ndarray) -> np.ndarray:
    """Which pixels show the shape, (H, W); none where those that stand out are 20 or fewer.

    The ground is the median along the edge; the foreground is what differs from it by more than half of the
    strongest difference (97th percentile, so that a few odd pixels do not decide).

    Args:
        pixels: RGB, (H, W, 3), 0 to 255.
    """
    inside = np.zeros(pixels.shape[:2], dtype=bool)
    inside[BORDER:-BORDER, BORDER:-BORDER] = True
    ground = np.median(pixels[~inside], axis=0)
    difference = np.linalg.norm(pixels - ground, axis=-1)
    foreground = difference > max(40.0, 0.5 * np.percentile(difference, 97))
    return foreground if foreground.sum() > 20 else np.zeros_like(foreground)


def read_image(image: Image.Image, colour: str) -> Reading:
    """Compare the shape in an image with the colour its caption names."""
    seen = shape_colour(image)
    distances = {name: float(np.linalg.norm(seen - np.array(rgb))) for name, rgb in COLOURS.items()}
    nearest = min(distances, key=lambda name: distances[name])
    red, green, blue = (round(float(channel), 1) for channel in seen)
    return Reading((red, green, blue), round(distances[colour], 1), nearest, nearest == colour)


def read_images(images: Sequence[Image.Image], scenes: Sequence[Scene]) -> list[Reading]:
    """One reading an image."""
    return [read_image(image, scene.colour) for image, scene in zip(images, scenes, strict=True)]


def summarise(readings: Sequence[Reading]) -> Score:
    """Mean over the readings."""
    return Score(
        accuracy=float(np.mean([reading.right for reading in readings])),
        distance=round(float(np.mean([reading.distance for reading in readings])), 1),
    )
