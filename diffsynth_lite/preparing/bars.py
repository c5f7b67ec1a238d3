"""This file finds the black bars at the edges of an image or clip: letterbox, pillarbox, or both.

A bar is dark (luma up to 20 of 255) and uniform (it differs by at most 10 within itself), but for one pixel
in a hundred, and at least a hundredth of the side deep. It ends in a straight hard border, where a line of
the content is brighter by 24 at many places at once: at 3 of 10 places where the opposite bar is as deep
(within 2 % of the side), at 8 of 10 where there is one bar only. At 4 of 10 places along it something in the
image is bright. So a night sky, lights in the dark, a vignette or a dark scene is not a bar. An image of
which less than 3 tenths of a side would remain has none.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops

_DARK, _UNIFORM, _BRIGHTER = 20, 10, 24
_DARK_PERCENT = (1, 99)
_MIN_DEPTH, _MIN_CONTENT, _EQUAL_DEPTH = 0.01, 0.3, 0.02
_BORDER_OF_TWO, _BORDER_OF_ONE = 0.3, 0.8
_MIN_LIT = 0.4  # of all places along the bar; a few lights in the dark have a hard border, too
_RINGING_PX = 8  # next to a hard border, the block of a JPEG that it lies in is not uniform

_Numbers = npt.NDArray[Any]


def black_bars(image: Image.Image) -> tuple[int, int, int, int] | None:
    """The box (left, top, right, bottom) without the black bars of an image; None where it has none.

    Args:
        image: upright, of any mode with 8 bits a channel. Transparent margins are not bars.
    """
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, (128, 128, 128, 255)), rgba)
    luma = np.asarray(image.convert("L"))
    top, bottom = _content(luma)
    left, right = _content(luma.T)
    box = (left, top, right, bottom)
    is_whole = box == (0, 0, image.width, image.height)
    is_little = right - left < _MIN_CONTENT * image.width or bottom - top < _MIN_CONTENT * image.height
    return None if is_whole or is_little else box


def common_bars(frames: Iterable[Image.Image]) -> tuple[int, int, int, int] | None:
    """The box without the bars that RGB frames of one size have in common; None where they have none."""
    brightest = reduce(ImageChops.lighter, frames)
    return black_bars(brightest)


def _content(lines: _Numbers) -> tuple[int, int]:
    """The first line after the bar at the start, and the first of the bar at the end.

    Args:
        lines: (lines, places), luma of an image whose bars lie along its lines.
    """
    length = len(lines)
    lit = np.percentile(lines, _DARK_PERCENT[1], axis=0) > _DARK
    if lit.mean() < _MIN_LIT:
        return 0, length
    low, high = np.percentile(lines, _DARK_PERCENT, axis=1)
    bright_ratio = (lines[:, lit] > _DARK + _BRIGHTER).mean(axis=1)
    start, end = _bar(low, high, bright_ratio), _bar(low[::-1], high[::-1], bright_ratio[::-1])
    are_two = start.depth and end.depth and abs(start.depth - end.depth) <= max(2, _EQUAL_DEPTH * length)
    least = _BORDER_OF_TWO if are_two else _BORDER_OF_ONE
    if are_two and min(start.border_ratio, end.border_ratio) < least:
        return 0, length
    first, last = (bar.depth if bar.border_ratio >= least else 0 for bar in (start, end))
    return first, length - last


class _Bar(NamedTuple):
    depth: int = 0
    border_ratio: float = 0.0


def _bar(low: _Numbers, high: _Numbers, bright_ratio: _Numbers) -> _Bar:
    """The lines from the first on that are dark and uniform, and the part of their border that is hard.

    Args:
        low: of each line, the darkest luma but for one pixel in a hundred, as ``high`` is the brightest.
        bright_ratio: part of each line that is brighter than a bar.
    """
    num_dark = int(np.argmin(high <= _DARK))
    clear = slice(max(1, num_dark - _RINGING_PX))
    if not num_dark or high[clear].max() - low[clear].min() > _UNIFORM:
        return _Bar()
    steps = np.diff(bright_ratio[num_dark - 1 : num_dark + _RINGING_PX])
    depth = num_dark + int(np.argmax(steps))
    return _Bar(depth, float(steps.max())) if depth >= max(2, _MIN_DEPTH * len(high)) else _Bar()
