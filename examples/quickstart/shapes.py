"""Drawings of one coloured shape on a plain ground, and the captions that describe them.

The mini model was trained on these drawings in the known colours; the quickstart teaches it the new ones.
Numbers about a drawing are fractions of the image's side.
"""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

RGB = tuple[int, int, int]

KNOWN_COLOURS: dict[str, RGB] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 180),
    "orange": (245, 140, 30),
    "cyan": (60, 200, 220),
    "pink": (245, 150, 190),
}
NEW_COLOURS: dict[str, RGB] = {
    "teal": (0, 128, 128),
    "magenta": (230, 0, 140),
    "lime": (150, 240, 20),
    "brown": (110, 60, 20),
}
COLOURS = KNOWN_COLOURS | NEW_COLOURS
GROUNDS: dict[str, RGB] = {"black": (10, 10, 10), "white": (245, 245, 245), "gray": (128, 128, 128)}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
SIZE = 64

POLYGON_CORNERS = {"square": 4, "triangle": 3}
POLYGON_REACH = 1.1  # a polygon reaches a little further out than a circle, so that it looks as large


@dataclass(frozen=True)
class Scene:
    """What a caption says: a shape in a named colour on a named ground."""

    colour: str
    shape: str
    ground: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape} on a {self.ground} background"


def training_scenes(colour: str, count: int) -> list[Scene]:
    """The first ``count`` of the 12 scenes of a new colour that a training set may hold.

    Every shape comes once before one comes twice, and the grounds take turns. The remaining 6 of the 18
    combinations are never drawn: see `held_out_scenes`.

    Raises:
        ValueError: ``count`` is above 12.
    """
    if count > 2 * len(SHAPES):
        raise ValueError(f"count {count}: a colour has {2 * len(SHAPES)} training scenes")
    first = list(NEW_COLOURS).index(colour)
    return [_scene(first, first + turn, 1 + turn // len(SHAPES)) for turn in range(count)]


def held_out_scenes() -> list[Scene]:
    """16 scenes, 4 of each new colour, that `training_scenes` never gives: what the score is measured on."""
    return [_scene(first, first + turn, 0) for first in range(len(NEW_COLOURS)) for turn in range(4)]


def _scene(colour: int, shape: int, shift: int) -> Scene:
    """A scene by its numbers; for each (colour, shape) the shifts 0, 1 and 2 are the three grounds."""
    shape %= len(SHAPES)
    ground = (colour + shape + shift) % len(GROUNDS)
    return Scene(list(NEW_COLOURS)[colour], SHAPES[shape], list(GROUNDS)[ground])


def known_scenes(count: int) -> list[Scene]:
    """Scenes of the known colours, one colour after the other, shapes and grounds taking turns."""
    colours, grounds = list(KNOWN_COLOURS), list(GROUNDS)
    return [
        Scene(colours[turn % len(colours)], SHAPES[turn % len(SHAPES)], grounds[turn % len(grounds)])
        for turn in range(count)
    ]


def random_known_scene(rng: random.Random) -> Scene:
    """Any of the 144 scenes of the known colours, all equally likely."""
    return Scene(rng.choice(list(KNOWN_COLOURS)), rng.choice(SHAPES), rng.choice(list(GROUNDS)))


def draw_scene(scene: Scene, rng: random.Random) -> Image.Image:
    """Draw a scene, 64 x 64, with a small jitter of place (5 %) and radius (26 to 32 %)."""
    return draw(
        scene.shape,
        COLOURS[scene.colour],
        GROUNDS[scene.ground],
        centre=(rng.uniform(0.45, 0.55), rng.uniform(0.45, 0.55)),
        radius=rng.uniform(0.26, 0.32),
    )


def draw(
    shape: str,
    colour: RGB,
    ground: RGB,
    *,
    centre: tuple[float, float] = (0.5, 0.5),
    radius: float = 0.29,
    outline: RGB | None = None,
) -> Image.Image:
    """Draw one shape, 64 x 64, smoothed by drawing it three times as large.

    Args:
        shape: one of `SHAPES`.
        colour: of the shape.
        ground: of everything else, the hole of a ring included.
        centre: x from the left and y from the top, fractions of the side.
        radius: of the circle that the shape about fills, a fraction of the side.
        outline: the colour of a larger copy of the shape below it, or None for no outline.
    """
    side = 3 * SIZE
    image = Image.new("RGB", (side, side), ground)
    canvas = ImageDraw.Draw(image)
    x, y, reach = side * centre[0], side * centre[1], side * radius
    if outline is not None:
        _paint(canvas, shape, x, y, 1.3 * reach, outline, ground)
    _paint(canvas, shape, x, y, reach, colour, ground)
    return image.resize((SIZE, SIZE), Image.Resampling.LANCZOS)


def _paint(
    canvas: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, colour: RGB, ground: RGB
) -> None:
    """Paint a shape around the pixel (x, y); lengths in pixels."""
    if shape in ("circle", "ring"):
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        if shape == "ring":
            hole = radius / 2
            canvas.ellipse((x - hole, y - hole, x + hole, y + hole), fill=ground)
    elif shape == "cross":
        half = 0.38 * radius
        canvas.rectangle((x - radius, y - half, x + radius, y + half), fill=colour)
        canvas.rectangle((x - half, y - radius, x + half, y + radius), fill=colour)
    else:
        canvas.polygon(_corners(shape, x, y, radius), fill=colour)


def _corners(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Corners of a square, a triangle or a five-pointed star, in pixels."""
    if shape == "star":
        reaches = [radius, 0.45 * radius] * 5
        start = -math.pi / 2
    else:
        reaches = [POLYGON_REACH * radius] * POLYGON_CORNERS[shape]
        start = math.pi / 4 if shape == "square" else -math.pi / 2
    step = 2 * math.pi / len(reaches)
    return [
        (x + reach * math.cos(start + corner * step), y + reach * math.sin(start + corner * step))
        for corner, reach in enumerate(reaches)
    ]
