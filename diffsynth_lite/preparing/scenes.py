"""This file finds the scenes of a clip, by the hard cuts between them.

Each frame is made 32 x 18 pixels; a step is the mean absolute difference of two neighbours, of 255. A cut is
a step of at least 10 that is twice the largest step within four frames of it, so that fast motion and fades
are none, and after which a quarter of a second is unlike the quarter before it, so that a flash is none. A
scene is half a second long at least.

PySceneDetect (0.7.2) does more, but all its detectors and both its packages need OpenCV: 60 MB or more, with
an FFmpeg of its own next to the one of PyAV.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

_SIZE = (32, 18)
_MIN_STEP, _PROMINENCE, _AROUND = 10.0, 2.0, 4
_FLASH_S, _MIN_SCENE_S = 0.25, 0.5


@dataclass(frozen=True, slots=True)
class Scene:
    """Frames of a clip that are shown one after the other, with nothing cut out.

    Attributes:
        first: index of its first frame in the clip.
        start_s: in seconds from the start of the clip.
    """

    first: int
    num_frames: int
    start_s: float
    duration_s: float

    @property
    def is_short(self) -> bool:
        """Whether it has less than half a second, which is too little to learn from."""
        return self.duration_s < _MIN_SCENE_S


def find_scenes(frames: Iterable[VideoFrame], duration_s: float) -> list[Scene]:
    """The scenes of a clip, one after the other, which leave nothing out; its times are from its first frame.

    Args:
        frames: all frames of the clip.
    """
    small, times_s = [], []
    reformatter = VideoReformatter()
    for frame in frames:
        assert frame.time is not None
        tiny = reformatter.reformat(frame, *_SIZE, "rgb24", interpolation=Interpolation.AREA, threads=1)
        small.append(tiny.to_ndarray().astype(np.uint8).ravel())
        times_s.append(frame.time)
    starts_s = [time - times_s[0] for time in times_s]
    bounds = [0, *_cuts(small, duration_s), len(small)]
    ends_s = [*starts_s, duration_s]
    return [
        Scene(first, after - first, starts_s[first], ends_s[after] - starts_s[first])
        for first, after in pairwise(bounds)
    ]


def _cuts(small: Sequence[npt.NDArray[np.uint8]], duration_s: float) -> list[int]:
    """Indexes of the frames with which another scene begins."""
    per_second = len(small) / duration_s
    around = max(1, min(_AROUND, round(_MIN_SCENE_S * per_second) - 1))
    flash = max(1, round(_FLASH_S * per_second))
    steps = [0.0, *(_step(*pair) for pair in pairwise(small))]

    def is_cut(index: int) -> bool:
        neighbours = [*steps[max(0, index - around) : index], *steps[index + 1 : index + 1 + around]]
        is_high = steps[index] >= max(_MIN_STEP, _PROMINENCE * max(neighbours, default=0.0))
        return is_high and _is_lasting(small, index, flash)

    return list(filter(is_cut, range(len(small))))


def _is_lasting(small: Sequence[npt.NDArray[np.uint8]], index: int, reach: int) -> bool:
    """Whether no frame from one on is like one of those before it."""
    least = _step(small[index - 1], small[index]) / 2
    before, after = small[max(0, index - reach) : index], small[index : index + reach]
    return all(_step(one, other) >= least for one in before for other in after)


def _step(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> float:
    return float(np.abs(one.astype(np.int16) - other).mean())
