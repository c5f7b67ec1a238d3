"""This file prepares a clip: its scenes become clips, or some of their frames images."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from av.video.frame import VideoFrame

from diffsynth_lite.data.audio import check_audio, read_audio
from diffsynth_lite.data.video import VideoFacts, check_video, read_frames, write_frames
from diffsynth_lite.data.video_decoding import all_frames, rgb_image
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Audio, AudioFormat
from diffsynth_lite.preparing.bars import common_bars
from diffsynth_lite.preparing.images import Fit, Steps, write_image
from diffsynth_lite.preparing.scenes import Scene, find_scenes
from diffsynth_lite.progress_log import ProgressLog

_CRF = 14
_NUM_LOOKED_AT = 16
"""Frames in which black bars are looked for."""
_AUDIO_PIECE_S = 60
_LONG_FRAMES = 3000
_SHARPNESS_SIDE = 512
_MIDDLE = (0.25, 0.75)
"""The part of its share of a scene from which a frame is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipPlan:
    """What becomes of a clip.

    Attributes:
        scenes: all, one if it is not cut.
    """

    facts: VideoFacts
    scenes: Sequence[Scene]
    fit: Fit

    @property
    def is_whole(self) -> bool:
        """Whether the clip stays as it is."""
        return len(self.scenes) == 1 and self.fit.is_whole

    @property
    def kept(self) -> Sequence[Scene]:
        """The scenes that something is made of: short ones are left out."""
        return self.scenes if len(self.scenes) == 1 else [one for one in self.scenes if not one.is_short]

    @property
    def is_even(self) -> bool:
        """Whether each frame is shown equally long: an AVI may repeat one without a rate that varies."""
        facts = self.facts
        return not facts.is_variable_rate and abs(facts.duration_s * facts.fps - facts.num_frames) < 0.5


def plan_clip(path: Path, steps: Steps) -> ClipPlan:
    """Look at a clip. To split it, all its frames are decoded.

    Raises:
        UserError: it cannot be read, or has only short scenes.
    """
    facts = check_video(path)
    scenes = [Scene(0, facts.num_frames, 0.0, facts.duration_s)]
    if steps.split_scenes:
        frames = _logged(all_frames(path), f"{path.name}: looked at", facts.num_frames)
        scenes = find_scenes(frames, facts.duration_s)
    box = None
    if steps.strip_bars:
        box = common_bars(read_frames(path, [time])[0] for time in facts.spread_times(_NUM_LOOKED_AT))
    size = (facts.width, facts.height)
    is_kept = len(scenes) == 1 and box is None and max(size) <= (steps.max_side or max(size))
    fit = Fit.of(size, box, steps.max_side, step=1 if is_kept or steps.extract_frames else 2)
    plan = ClipPlan(facts=facts, scenes=scenes, fit=fit)
    if not plan.kept:
        raise UserError("has no scene of half a second; leave it out, or give no --split-scenes")
    return plan


def write_scenes(source: Path, plan: ClipPlan, results: Sequence[Sequence[Path]]) -> None:
    """Write a clip of each scene, or images of it, except where they are there already.

    Of a clip the rate stays; where it varies, the time of each frame does. Audio is cut with the frames.
    Images are evenly spread: of each share of a scene the sharpest frame around the middle.

    Args:
        results: for each scene that is kept one clip, with the suffix ".mp4", or its images.
    """
    scenes = (scene for scene in plan.scenes for _ in range(scene.num_frames))
    shown = _logged(all_frames(source), f"{source.name}: written", plan.facts.num_frames)
    paths_of = dict(zip(plan.kept, results, strict=True))
    for scene, pairs in groupby(zip(scenes, shown, strict=True), key=lambda pair: pair[0]):
        paths, frames = paths_of.get(scene, ()), (frame for _, frame in pairs)
        if all(path.exists() for path in paths):
            continue
        if paths[0].suffix == ".mp4":
            _write_scene(source, plan, scene, frames, paths[0])
            continue
        for frame, path in zip(_sharp(frames, scene.num_frames, len(paths)), paths, strict=True):
            write_image(plan.fit.apply(rgb_image(frame)), path)


def _write_scene(
    source: Path, plan: ClipPlan, scene: Scene, frames: Iterator[VideoFrame], result: Path
) -> None:
    first = next(frames)
    images = (
        (place if plan.is_even else (frame.pts or 0) - (first.pts or 0), plan.fit.apply(rgb_image(frame)))
        for place, frame in enumerate(chain([first], frames))
    )
    write_frames(
        result,
        images,
        size=plan.fit.size,
        rate=Fraction(plan.facts.fps).limit_denominator(1001),
        time_base=None if plan.is_even else first.time_base,
        audio=_audio(source, scene),
        crf=_CRF,
    )


def _audio(source: Path, scene: Scene) -> Iterator[Audio]:
    """The audio of a scene in pieces; nothing where the file has none."""
    facts = check_audio(source)
    if facts is None:
        return
    form = AudioFormat(sample_rate=facts.sample_rate, num_channels=min(2, facts.num_channels))
    place_s = 0.0
    while place_s < scene.duration_s:
        piece_s = min(_AUDIO_PIECE_S, scene.duration_s - place_s)
        piece = read_audio(source, scene.start_s + place_s, piece_s, form)
        yield piece or Audio.silent(form, piece_s)
        place_s += _AUDIO_PIECE_S


def _sharp(frames: Iterable[VideoFrame], num_frames: int, count: int) -> Iterator[VideoFrame]:
    """The sharpest frame around the middle of each of ``count`` equal parts of some frames."""

    def quality(pair: tuple[int, VideoFrame]) -> tuple[bool, float]:
        place = (pair[0] + 0.5) * count / num_frames % 1
        is_near = _MIDDLE[0] <= place < _MIDDLE[1]
        return is_near, _sharpness(pair[1]) if is_near else -abs(place - 0.5)

    for _, pairs in groupby(enumerate(frames), key=lambda pair: pair[0] * count // num_frames):
        yield max(pairs, key=quality)[1]


def _sharpness(frame: VideoFrame) -> float:
    """Variance of the Laplacian of the luma of a frame that is at most 512 pixels wide and high."""
    scale = min(1.0, _SHARPNESS_SIDE / max(frame.width, frame.height))
    width, height = (max(3, round(side * scale)) for side in (frame.width, frame.height))
    luma = frame.reformat(width, height, "gray", threads=1).to_ndarray().astype(np.float32)
    across, down = luma[:, 2:] + luma[:, :-2], luma[2:] + luma[:-2]
    return float(np.var(across[1:-1] + down[:, 1:-1] - 4 * luma[1:-1, 1:-1]))


def _logged(frames: Iterable[VideoFrame], text: str, num_frames: int) -> Iterator[VideoFrame]:
    """Log how far the decoding of a long clip is."""
    if num_frames < _LONG_FRAMES:
        yield from frames
        return
    log = ProgressLog(f"{text} %d of %d frames", num_frames, phase="reading")
    for frame in frames:
        yield frame
        log.advance()
