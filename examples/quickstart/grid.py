"""Arranges images in a labelled grid that a person can look at."""

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

GAP = 6
ROW_LABEL_WIDTH = 64
HEADING_HEIGHT = 28
CAPTION_HEIGHT = 36
INK, PAPER = (30, 30, 30), (255, 255, 255)


@dataclass(frozen=True)
class Panel:
    """A heading, one caption a column, and rows of images of one size by their label.

    Images are shown ``scale`` times as large as they are, without smoothing.
    """

    heading: str
    captions: Sequence[str]
    rows: dict[str, Sequence[Image.Image]]
    scale: int = 2

    @property
    def cell(self) -> tuple[int, int]:
        """Width and height of an image as it is shown, in pixels."""
        width, height = next(iter(self.rows.values()))[0].size
        return self.scale * width, self.scale * height

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        cell_width, cell_height = self.cell
        width = ROW_LABEL_WIDTH + len(self.captions) * (cell_width + GAP)
        return width, HEADING_HEIGHT + CAPTION_HEIGHT + len(self.rows) * (cell_height + GAP)


def draw_grid(panels: Sequence[Panel]) -> Image.Image:
    """The panels one below the other."""
    sizes = [panel.size for panel in panels]
    width = max(width for width, _ in sizes) + GAP
    sheet = Image.new("RGB", (width, sum(height for _, height in sizes) + GAP), PAPER)
    top = GAP
    for panel, (_, height) in zip(panels, sizes, strict=True):
        _draw_panel(sheet, panel, top)
        top += height
    return sheet


def _draw_panel(sheet: Image.Image, panel: Panel, top: int) -> None:
    canvas = ImageDraw.Draw(sheet)
    small, large = ImageFont.load_default(12), ImageFont.load_default(16)
    canvas.text((GAP, top), panel.heading, INK, large)
    top += HEADING_HEIGHT
    width, height = panel.cell
    lefts = [ROW_LABEL_WIDTH + column * (width + GAP) for column in range(len(panel.captions))]
    for left, caption in zip(lefts, panel.captions, strict=True):
        canvas.multiline_text((left, top), caption, INK, small)
    top += CAPTION_HEIGHT
    for label, images in panel.rows.items():
        canvas.text((GAP, top + height // 2), label, INK, small, anchor="lm")
        for left, image in zip(lefts, images, strict=True):
            sheet.paste(image.resize(panel.cell, Image.Resampling.NEAREST), (left, top))
        top += height + GAP
