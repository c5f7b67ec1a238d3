"""Clips of one coloured shape that moves over a plain ground, and the captions that describe them.

The mini Wan was trained on such clips in four directions; the video quickstart teaches it a fifth word.
Directions are (right, down), as pixels are counted.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image
from shapes import COLOURS, GROUNDS, KNOWN_COLOURS, draw

Direction = tuple[float, float]

KNOWN_DIRECTIONS: dict[str, Direction] = {
    "right": (1.0, 0.0),
    "left": (-1.0, 0.0),
    "down": (0.0, 1.0),
    "up": (0.0, -1.0),
}
NEW_WORD = "diagonally"
# Towards the lower right; 0.75 each, so that the shape stays in the image.
DIRECTIONS = KNOWN_DIRECTIONS | {NEW_WORD: (0.75, 0.75)}
SHAPES = ("circle", "square", "triangle", "ring")
NUM_FRAMES = 9
FPS = 16


@dataclass(frozen=True)
class MovingScene:
    """What a caption says: a shape in a named colour moves in a named direction over a named ground."""

    colour: str
    shape: str
    direction: str
    ground: str

    @property
    def caption(self) -> str:
        return f"a {self.colour} {self.shape} moving {self.direction} on a {self.ground} background"


def training_scenes() -> list[MovingScene]:
    """48 scenes: 32 of the new word, every colour with every shape once, and 4 of each known direction.

    Without the known directions in the training set all shapes would move diagonally in the end.
    """
    colours, shapes = len(KNOWN_COLOURS), len(SHAPES)
    new = [
        _scene(colour, shape, 1 + (colour + shape) % 2, NEW_WORD)
        for colour in range(colours)
        for shape in range(shapes)
    ]
    known = [
        _scene(2 * shape + place % 2, shape, 1 + (place + shape) % 2, direction)
        for place, direction in enumerate(KNOWN_DIRECTIONS)
        for shape in range(shapes)
    ]
    return new + known


def held_out_scenes() -> list[MovingScene]:
    """8 scenes of the new word, one a colour, that `training_scenes` does not give."""
    return [_scene(colour, colour + 1, 0, NEW_WORD) for colour in range(len(KNOWN_COLOURS))]


def known_scenes() -> list[MovingScene]:
    """8 scenes of the known directions, two of each, one a colour, that `training_scenes` does not give."""
    directions = list(KNOWN_DIRECTIONS)
    return [
        _scene(colour, colour, 0, directions[colour // 2 % len(directions)])
        for colour in range(len(KNOWN_COLOURS))
    ]


def _scene(colour: int, shape: int, shift: int, direction: str) -> MovingScene:
    """A scene by its numbers; for each (colour, shape) the shifts 0 to 2 are the three grounds."""
    shape %= len(SHAPES)
    ground = list(GROUNDS)[(colour + shape + shift) % len(GROUNDS)]
    return MovingScene(list(KNOWN_COLOURS)[colour], SHAPES[shape], direction, ground)


def draw_clip(scene: MovingScene, rng: random.Random) -> list[Image.Image]:
    """9 frames of 64 x 64; the shape is near the middle in the fifth one.

    Speed (3.5 to 5 % of the side a frame), place (4 %) and radius (18 to 24 %) have a small jitter.
    """
    centre = (rng.uniform(0.46, 0.54), rng.uniform(0.46, 0.54))
    return draw_frames(scene, centre=centre, speed=rng.uniform(0.035, 0.05), radius=rng.uniform(0.18, 0.24))


def draw_frames(
    scene: MovingScene,
    *,
    centre: tuple[float, float] = (0.5, 0.5),
    speed: float = 0.042,
    radius: float = 0.21,
) -> list[Image.Image]:
    """9 frames of 64 x 64, exactly; lengths are fractions of the side.

    Args:
        scene: what moves where.
        centre: of the shape in the fifth frame, from the left and from the top.
        speed: how far it moves from frame to frame, in units of its direction.
        radius: of the shape.
    """
    right, down = DIRECTIONS[scene.direction]
    return [
        draw(
            scene.shape,
            COLOURS[scene.colour],
            GROUNDS[scene.ground],
            centre=(centre[0] + right * moved, centre[1] + down * moved),
            radius=radius,
        )
        for moved in (speed * (frame - NUM_FRAMES // 2) for frame in range(NUM_FRAMES))
    ]


def make_strip(frames: Sequence[Image.Image]) -> Image.Image:
    """Every second frame, side by side."""
    shown = frames[::2]
    width, height = shown[0].size
    strip = Image.new("RGB", (width * len(shown), height))
    for place, frame in enumerate(shown):
        strip.paste(frame, (place * width, 0))
    return strip
