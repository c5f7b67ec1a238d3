"""This file lays previews out as one picture: a row for each prompt, a column for each step."""

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

_MIN_CELL_PX = 128
_MAX_CELL_PX = 384
_MARGIN_PX = 8
_LABEL_WIDTH_PX = 190
_HEADER_PX = 28
_FONT_PX = 14
_LINE_CHARACTERS = 25
_STRIP_FRAMES = 5


def frame_strip(frames: Sequence[Image.Image]) -> Image.Image:
    """A picture of a clip: up to five of its frames side by side, evenly spread; a single frame is itself."""
    count = min(len(frames), _STRIP_FRAMES)
    shown = [frames[round(place * (len(frames) - 1) / max(1, count - 1))] for place in range(count)]
    width, height = frames[0].size
    strip = Image.new("RGB", (count * width, height))
    for place, frame in enumerate(shown):
        strip.paste(frame, (place * width, 0))
    return strip


def preview_grid(
    rows: Sequence[Sequence[Image.Image]], prompts: Sequence[str], steps: Sequence[int]
) -> Image.Image:
    """One picture of all previews, with prompts on the left and steps on top.

    Args:
        rows: for each prompt its previews, one a step, all of one size.
        prompts: one a row.
        steps: one a column.
    """
    width, height = _cell_size(rows[0][0])
    font = ImageFont.load_default(_FONT_PX)
    size = (
        _LABEL_WIDTH_PX + len(steps) * (width + _MARGIN_PX) + _MARGIN_PX,
        _HEADER_PX + len(rows) * (height + _MARGIN_PX) + _MARGIN_PX,
    )
    grid = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(grid)
    for column, step in enumerate(steps):
        canvas.text((_left(column, width), _MARGIN_PX), f"step {step}", fill="black", font=font)
    for row, (prompt, previews) in enumerate(zip(prompts, rows, strict=True)):
        top = _HEADER_PX + row * (height + _MARGIN_PX)
        label = textwrap.fill(
            prompt, _LINE_CHARACTERS, max_lines=max(1, height // (_FONT_PX + 4)), placeholder=" ..."
        )
        canvas.multiline_text((_MARGIN_PX, top), label, fill="black", font=font)
        for column, preview in enumerate(previews):
            grid.paste(preview.resize((width, height), Image.Resampling.LANCZOS), (_left(column, width), top))
    return grid


def _left(column: int, width: int) -> int:
    return _LABEL_WIDTH_PX + column * (width + _MARGIN_PX)


def _cell_size(preview: Image.Image) -> tuple[int, int]:
    """Size of a preview in the grid: its longer side between the two bounds, its shape kept."""
    longer = max(preview.size)
    scale = min(max(longer, _MIN_CELL_PX), _MAX_CELL_PX) / longer
    return round(preview.width * scale), round(preview.height * scale)
