"""This file chooses the training size of each item: the items of one bucket have one size and frame count.

A size is called smaller than another where neither of its sides is larger.
"""

from dataclasses import dataclass, field
from fractions import Fraction

from diffsynth_lite.errors import UserError

Size = tuple[int, int]

_NEARLY_AS_MUCH = Fraction(97, 100)
"""Part of the area kept by the best explicit size that a larger size must keep to be preferred: sizes whose
aspect ratios differ only by rounding to the divisor count as equal."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Bucket:
    """The size and length that all items of a batch share.

    Attributes:
        width: in pixels.
        inputs: width and height at which the input images are encoded, in the order of the images.
        num_layers: layers that the image is split into; 0 for data without layers.
    """

    width: int
    height: int
    num_frames: int = 1
    inputs: tuple[Size, ...] = ()
    num_layers: int = 0

    def __repr__(self) -> str:
        # Checkpoints identify their data by it: the form without layers must never change.
        size = f"width={self.width}, height={self.height}, num_frames={self.num_frames}"
        layers = f", num_layers={self.num_layers}" if self.num_layers else ""
        return f"Bucket({size}, inputs={self.inputs}{layers})"

    @property
    def num_images(self) -> int:
        """Images of an item along the axis of frames: its frames, or the image and its layers."""
        return self.num_frames + self.num_layers

    @property
    def name(self) -> str:
        """Such as ``832x480``, ``832x480x81``, ``832x480 in 4 layers`` or ``832x480 from 1024x1024``."""
        name = f"{self.width}x{self.height}" + (f"x{self.num_frames}" if self.num_frames > 1 else "")
        if self.num_layers:
            name += f" in {self.num_layers} layer{'s' * (self.num_layers > 1)}"
        inputs = "+".join(f"{width}x{height}" for width, height in self.inputs)
        return f"{name} from {inputs}" if inputs else name


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketRule:
    """Which bucket an item of some size and length belongs to.

    An item gets, among the sizes that are allowed and no larger than the item, the one that crops least of
    it, and among equals the larger one. Explicit sizes that keep at least 97 % of what the best one keeps
    count as equals. Of the sizes of a resolution only those count that no other such size exceeds. For each
    item:

    - both sides are multiples of ``step``, so of ``divisor``; explicit sizes are multiples of ``divisor``;
    - width x height is at most the square of the resolution, and the longer side at most
      ``max_aspect_ratio`` times the shorter one;
    - nothing is enlarged, unless ``upscale`` allows it;
    - with m the shorter side that the item has when it is scaled down to the budget, at least
      (1 - step / m)**2 of its area is kept, if its aspect ratio is at most
      ``max_aspect_ratio * (1 - step / m)``. This does not hold for explicit sizes.

    Attributes:
        divisor: sides must be multiples of it, in pixels; the model family's.
        step: sides are multiples of it, in pixels; a multiple of ``divisor``. Larger ones make fewer buckets.
        resolutions: edges of squares with as many pixels as a frame may have; one bucket of each for an item.
        sizes: width and height of all buckets, in place of ``resolutions``.
        max_aspect_ratio: longer over shorter side of the sizes of a resolution, at least 1.
        frame_counts: frames that a clip may have.
        upscale: also allow sizes that are larger than the item.
    """

    divisor: int
    step: int
    resolutions: tuple[int, ...] = ()
    sizes: tuple[Size, ...] = ()
    max_aspect_ratio: float = 2.0
    frame_counts: tuple[int, ...] = (1,)
    upscale: bool = False
    _known: dict[tuple[int, int, int], Size | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if bool(self.resolutions) == bool(self.sizes):
            raise UserError("buckets need either resolutions or sizes, and not both")
        if self.step < 1 or self.step % self.divisor:
            raise UserError(f"bucket step {self.step} must be a multiple of {self.divisor}")
        if self.max_aspect_ratio < 1:
            raise UserError(f"max_aspect_ratio {self.max_aspect_ratio} must be at least 1")
        if not self.frame_counts or min(self.frame_counts) < 1:
            raise UserError(f"frame counts {list(self.frame_counts)} must be at least 1")
        for resolution in self.resolutions:
            if resolution < self.step:
                raise UserError(
                    f"resolution {resolution} is less than the bucket step {self.step}: nothing fits; "
                    f"{self.step} is the least"
                )
        for width, height in self.sizes:
            if min(width, height) < 1 or width % self.divisor or height % self.divisor:
                raise UserError(
                    f"bucket size {width}x{height}: both sides must be multiples of {self.divisor}"
                )

    @property
    def num_resolutions(self) -> int:
        """Buckets that each item gets, one for each resolution."""
        return len(self.resolutions) or 1

    def bucket(self, resolution_index: int, width: int, height: int, num_frames: int | None) -> Bucket:
        """The bucket of an item at one of the resolutions.

        Args:
            resolution_index: which of ``resolutions``, in [0, num_resolutions).
            width: of the upright item, in pixels.
            num_frames: frames of the clip at the training rate; None for an image, which is always allowed
                and has one.
        """
        place = (resolution_index, width, height)
        if place not in self._known:
            allowed = self._allowed_sizes(resolution_index, width, height)
            self._known[place] = self._best((width, height), allowed)
        size = self._known[place]
        if size is None:
            given = set(self.sizes) or {(self.step, self.step)}
            least = " or ".join(
                f"{w}x{h}"
                for w, h in sorted(given)
                if not any(other != (w, h) and other[0] <= w and other[1] <= h for other in given)
            )
            raise UserError(
                f"{width}x{height} pixels are too few: the least is {least}; "
                "leave the item out or allow upscaling"
            )
        return Bucket(width=size[0], height=size[1], num_frames=self._frames(num_frames))

    def _best(self, item: Size, allowed: list[Size]) -> Size | None:
        # Fractions, because the sizes of one aspect ratio must compare as equal.
        kept = {size: kept_ratio(item, size) for size in allowed}
        if not self.sizes:
            return max(kept, key=lambda size: (kept[size], size[0] * size[1]), default=None)
        enough = _NEARLY_AS_MUCH * max(kept.values(), default=0)
        nearest = [size for size in kept if kept[size] >= enough]
        return max(nearest, key=lambda size: (size[0] * size[1], kept[size]), default=None)

    def _frames(self, num_frames: int | None) -> int:
        if num_frames is None:
            return 1
        covered = [count for count in self.frame_counts if count <= num_frames]
        if not covered:
            raise UserError(
                f"{num_frames} frames are too few: the least is {min(self.frame_counts)}; "
                "leave the clip out, or allow a smaller frame count"
            )
        return max(covered)

    def _allowed_sizes(self, resolution_index: int, width: int, height: int) -> list[Size]:
        """Sizes that fit the item; of a resolution only those that no other one exceeds."""
        if self.sizes:
            return [size for size in self.sizes if self.upscale or (size[0] <= width and size[1] <= height)]
        area, step = self.resolutions[resolution_index] ** 2, self.step
        limits = (area, area) if self.upscale else (width, height)
        sizes: list[Size] = []
        highest = 0
        widest = min(limits[0], int((area * self.max_aspect_ratio) ** 0.5) + 1)
        for w in range(widest // step * step, 0, -step):
            h = int(min(limits[1], area // w, w * self.max_aspect_ratio)) // step * step
            if h > highest and w <= h * self.max_aspect_ratio:
                sizes.append((w, h))
                highest = h
        return sizes


def kept_ratio(item: Size, size: Size) -> Fraction:
    """Part of an item's area that is left after it is scaled to cover a size and cropped, in (0, 1]."""
    one, other = item[0] * size[1], item[1] * size[0]
    return Fraction(min(one, other), max(one, other))
