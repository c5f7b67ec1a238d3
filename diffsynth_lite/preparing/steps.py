"""This file defines what is done to the images and clips of a folder, and to the frames of each."""

from dataclasses import dataclass

from PIL import Image

Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """What is done to each file.

    Attributes:
        split_scenes: each scene of a clip becomes a clip.
        extract_frames: so many images are made of each clip, or of each of its scenes, in its place.
        max_side: longest side in pixels of what is written.
        strip_bars: black bars are cut off.
    """

    split_scenes: bool = False
    extract_frames: int | None = None
    max_side: int | None = None
    strip_bars: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """How an image or frame is cropped and scaled down.

    Attributes:
        box: left, top, right and bottom of what is kept.
        size: width and height of the result.
    """

    box: Box
    size: tuple[int, int]

    @classmethod
    def of(cls, size: tuple[int, int], box: Box | None, max_side: int | None, *, step: int = 1) -> "Fit":
        """Fit an image.

        Args:
            size: width and height of the image.
            box: what is kept; None is all.
            step: the sides of the result are multiples of it.
        """
        left, top, right, bottom = box or (0, 0, *size)
        width, height = right - left, bottom - top
        scale = min(1.0, (max_side or max(width, height)) / max(width, height))
        if scale < 1:
            width, height = (max(step, round(side * scale / step) * step) for side in (width, height))
        else:  # a line less is better than one more pixel that is made up
            width, height = (max(step, side // step * step) for side in (width, height))
            right, bottom = min(right, left + width), min(bottom, top + height)
        return cls((left, top, right, bottom), (width, height))

    def is_whole(self, size: tuple[int, int]) -> bool:
        """Whether an image of this size stays as it is."""
        return self.box == (0, 0, *size) and self.size == size

    def apply(self, image: Image.Image) -> Image.Image:
        """Crop an image, and scale it by Lanczos."""
        kept = image if self.box == (0, 0, *image.size) else image.crop(self.box)
        return kept if kept.size == self.size else kept.resize(self.size, Image.Resampling.LANCZOS)
