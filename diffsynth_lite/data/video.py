"""This file checks a video, chooses times in it, reads the frames shown at them, and writes videos.

Times are in seconds from the frame that is shown first. A frame is shown from its own time to that of the
next one, the last for its duration in the file: 25 frames at 25 fps cover the times from 0 to below 1.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, pairwise
from math import floor
from os import SEEK_CUR
from pathlib import Path
from statistics import median_low
from typing import Literal

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.codec import Codec
from av.codec.codec import UnknownCodecError
from av.container import OutputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from diffsynth_lite.data.video_decoding import (
    CHUNK_HEADER_BYTES,
    FFMPEG,
    LAYOUTS,
    OpenClip,
    all_frames,
    clip_start,
    frames_from,
    is_shown,
    opened_clip,
    rgb_image,
    timed,
)
from diffsynth_lite.errors import UserError
from diffsynth_lite.files import replacing
from diffsynth_lite.media import Audio

DECODER_ID = f"v1 libavcodec {FFMPEG['libavcodec']} libswscale {FFMPEG['libswscale']}"
"""All that decides a clip's pixels besides its bytes; part of cache keys, so change it with the code."""
AVI_ID = "avi 2"
"""Version of the reading of AVI files: since 2 the times of their frames are those of the index."""

ClipPlace = Literal["start", "center", "random", "uniform"]

_TIME_TOLERANCE_S = Fraction(1, 1000)
"""Matroska, and with it WebM, rounds times to a millisecond."""

_MIN_HEADER_TOLERANCE_S = 0.1
"""The length in a Matroska header may exceed that of the packets by this, or by one frame if longer."""

_AAC = {"b": "192k"}
_USUAL_RATE = 48_000

_ENCODERS = {
    # x264 spends bits differently from run to run under adaptive quantisation (seen with x264 165).
    "libx264": {"preset": "veryfast", "aq-mode": "none", "mbtree": "0"},
    "libx265": {"preset": "veryfast", "x265-params": "log-level=error"},
}
"""Options by FFmpeg's name; the first that is there is taken. PyAV's wheels have both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFacts:
    """Facts of a video file.

    Attributes:
        width: of a frame as it is shown, in pixels.
        num_frames: frames that are shown.
        duration_s: from the start of the first frame to the end of the last.
        fps: frames per second; the mean if the rate varies; for an AVI the rate of most frames.
        is_variable_rate: whether its frames have different durations.
    """

    width: int
    height: int
    num_frames: int
    duration_s: float
    fps: float
    is_variable_rate: bool

    def spread_times(self, count: int) -> list[float]:
        """Times in seconds, in the middle of so many equal parts."""
        return [self.duration_s * (place + 0.5) / count for place in range(count)]


def is_avi(path: Path) -> bool:
    """Whether a file is an AVI, by its name."""
    return path.suffix.lower() == ".avi"


def check_video(path: Path) -> VideoFacts:
    """Read the times of all frames, decoding only the first frame."""
    start = clip_start(path)
    with opened_clip(path) as clip:
        times, last_duration = _frame_times(path, clip, start.pts)
        nominal = clip.stream.average_rate
        has_slots = clip.container.format.name == "avi"
    intervals = [later - earlier for earlier, later in pairwise(times)]
    mean = Fraction(times[-1] - times[0], len(intervals)) if intervals else Fraction(last_duration)
    if mean == 0:
        raise UserError(f"{path}: has no duration for its only frame; save it as an image")
    duration_s = (times[-1] - times[0] + (last_duration or mean)) * start.time_base
    rate = len(times) / duration_s
    unevenness = max((abs(interval - mean) for interval in intervals), default=Fraction(0))
    is_variable_rate = unevenness > max(Fraction(1), mean / 100)
    if not is_variable_rate and nominal and abs(1 / (nominal * start.time_base) - mean) <= 1:
        rate = nominal  # the mean of rounded times is not exact
    if has_slots and intervals:
        rate = 1 / (median_low(intervals) * start.time_base)  # a repeated frame does not change it
    return VideoFacts(
        width=start.width,
        height=start.height,
        num_frames=len(times),
        duration_s=float(duration_s),
        fps=float(rate),
        is_variable_rate=is_variable_rate,
    )


def read_frames(
    path: Path, times_s: Sequence[float], *, each: Callable[[Image.Image], Image.Image] = lambda image: image
) -> list[Image.Image]:
    """Decode the frames that are shown at the given times, and only others near them.

    A time that is below that of the next frame by less than the file's rounding, at most a millisecond,
    counts as that of the next frame.

    Args:
        path: MP4, MOV, Matroska, WebM or AVI.
        times_s: in seconds from the first frame, in [0, duration), in any order.
        each: transform of an upright RGB frame, such as a crop, before the next one is decoded: a clip of a
            few KiB can have gigabytes of pixels.

    Returns:
        The transformed frames, one for each time; equal times of one frame share an image.
    """
    start = clip_start(path)
    tolerance = (min(start.time_base, _TIME_TOLERANCE_S) + Fraction(1, 10**6)) / start.time_base
    times = sorted(set(times_s))
    if times and times[0] < 0:
        raise UserError(f"{path}: a frame at {times[0]:g} s is asked for, before its first")
    if not times:
        return []
    wanted = [Fraction(time) / start.time_base + start.pts for time in times]
    try:
        frames = frames_from(path, floor(wanted[0] + tolerance), first_pts=start.pts)
        images = _images_shown(frames, wanted, tolerance, each)
    except UserError:
        # Some clips (intra refresh) have keyframes that decode only after the frames before them; decoding
        # everything distinguishes them from damage.
        images = _images_shown(all_frames(path), wanted, tolerance, each)
    if len(images) < len(wanted):
        raise UserError(f"{path}: a frame at {times[len(images)]:g} s is asked for, but the clip ends before")
    found = dict(zip(times, images, strict=True))
    return [found[time] for time in times_s]


def clip_times(start_s: float, *, num_frames: int, fps: float) -> list[float]:
    """Times of the frames of a clip that begins at ``start_s`` and has ``fps`` frames a second."""
    return [start_s + index / fps for index in range(num_frames)]


def max_frames(duration_s: float, fps: float) -> int:
    """Frames at ``fps`` that fit in ``duration_s``, each shown for its whole 1 / fps seconds."""
    return floor((duration_s + float(_TIME_TOLERANCE_S)) * fps)


def clip_starts(
    duration_s: float,
    clip_s: float,
    *,
    fps: float,
    where: ClipPlace,
    count: int,
    draw: Callable[[int], float],
) -> list[float]:
    """Times at which the clips taken of a file begin.

    Args:
        duration_s: length of the file.
        clip_s: length of a clip, at most ``duration_s``.
        fps: rate of the file. Starts are multiples of 1 / fps, so that the frames of a clip at the file's own
            rate are neighbours whatever the file's rounding of times.
        where: "start", "center", "random", or "uniform": from the start to the end at equal distances.
        count: number of clips; 1 for "start" and "center".
        draw: maps the index of a clip to a number in [0, 1), for "random".

    Returns:
        Starts in ascending order, each once: fewer than ``count`` where no more differ.
    """
    slack = duration_s - clip_s
    if slack < -float(_TIME_TOLERANCE_S):
        raise UserError(f"{duration_s:g} s are too short for a clip of {clip_s:g} s")
    if count > 1 and where in ("start", "center"):
        raise UserError(f"{count} clips of one file cannot all be at its {where}; use random or uniform")
    num_starts = floor((max(slack, 0.0) + float(_TIME_TOLERANCE_S)) * fps) + 1
    if where == "start":
        chosen = {0}
    elif where == "random":
        chosen = {int(draw(index) * num_starts) for index in range(count)}
    elif where == "center" or count == 1:
        chosen = {(num_starts - 1) // 2}
    else:
        chosen = {index * (num_starts - 1) // (count - 1) for index in range(count)}
    return [index / fps for index in sorted(chosen)]


def _frame_times(path: Path, clip: OpenClip, first_pts: int) -> tuple[list[int], int]:
    """Sorted times of the shown frames and the duration of the last (0: unknown), after counting packets."""
    times: dict[int, int] = {}
    num_packets = 0
    num_shown = 0
    ends_s: defaultdict[int, float] = defaultdict(float)  # of each stream, by its number
    for packet in timed(clip, clip.container.demux()):
        if packet.pts is None:
            continue
        end_s = float((packet.pts + (packet.duration or 0)) * packet.time_base)
        ends_s[packet.stream_index] = max(ends_s[packet.stream_index], end_s)
        if packet.stream_index != clip.stream.index:
            continue
        num_packets += 1
        if packet.is_corrupt:
            raise UserError("damaged or cut off")
        if packet.is_discard and clip.container.duration is None:
            raise UserError("damaged: frames are cut by times that it does not have")
        if is_shown(packet) and packet.pts >= first_pts:
            num_shown += 1
            times[packet.pts] = packet.duration or 0
    _check_complete(path, clip, num_packets, ends_s)
    if num_shown > len(times):
        raise UserError("several frames have the same time; save it again")
    ordered = sorted(times)
    return ordered, times[ordered[-1]]


def _check_complete(path: Path, clip: OpenClip, num_packets: int, ends_s: Mapping[int, float]) -> None:
    """Compare the packets with the header: by their number, or by the length in Matroska."""
    kind = clip.container.format.name
    if "mp4" in kind:
        promised = len(clip.stream.index_entries)
        if promised < clip.stream.frames and _ends_early(clip.stream, ends_s[clip.stream.index]):
            promised = clip.stream.frames
    elif kind == "avi":
        promised = clip.stream.frames
        num_packets += _num_empty_chunks(path, clip.stream)
    else:
        _check_length(clip, max(ends_s.values()))
        return
    if num_packets < promised:
        raise UserError(f"cut off: {num_packets} of {promised} frames are there")


def _num_empty_chunks(path: Path, stream: VideoStream) -> int:
    """Number of the chunks of an AVI without data, for which there are no packets.

    The times in the index count the chunks before a frame; those after the last frame are read from the file.
    """
    entries = [entry for entry in stream.index_entries if entry.size]
    if not entries:
        return 0
    last = entries[-1]
    num_empty = last.timestamp + 1 - len(entries)
    with path.open("rb") as file:
        file.seek(max(0, last.pos) + CHUNK_HEADER_BYTES + last.size + last.size % 2)
        # The name of a chunk begins with the number of its stream; that of an index does not.
        while len(head := file.read(CHUNK_HEADER_BYTES)) == CHUNK_HEADER_BYTES and head[:2].isdigit():
            size = int.from_bytes(head[4:], "little")
            num_empty += size == 0 and int(head[:2]) == stream.index
            file.seek(size + size % 2, SEEK_CUR)
    return num_empty


def _ends_early(stream: VideoStream, end_s: float) -> bool:
    """Whether frames that are missing in the index of an MP4 are missing at its end.

    FFmpeg ends the index where the tables are damaged, and leaves out frames that an edit list cuts; the
    duration is that of the others.
    """
    if stream.duration is None or stream.time_base is None:
        return True
    half_a_frame_s = float(1 / stream.average_rate) / 2 if stream.average_rate else 0.0
    return end_s < float(((stream.start_time or 0) + stream.duration) * stream.time_base) - half_a_frame_s


def _check_length(clip: OpenClip, end_s: float) -> None:
    promised_s = float((clip.container.duration or 0) / av.time_base)
    rate = clip.stream.average_rate
    tolerance_s = max(_MIN_HEADER_TOLERANCE_S, float(1 / rate) if rate else 0)
    if end_s < promised_s - tolerance_s:
        raise UserError(f"cut off: {end_s:g} of {promised_s:g} s are there")


def _images_shown(
    frames: Generator[VideoFrame, None, None],
    wanted: Sequence[Fraction],
    tolerance: Fraction,
    each: Callable[[Image.Image], Image.Image],
) -> list[Image.Image]:
    """Images of the frames shown at the sorted times ``wanted``; fewer if the clip ends before."""
    images: list[Image.Image] = []
    with closing(frames):
        for frame, end in _spans(frames, tolerance):
            num_shown = bisect_left(wanted, end) - len(images)
            images += [each(rgb_image(frame))] * num_shown if num_shown > 0 else []
            if len(images) == len(wanted):
                break
    return images


def _spans(frames: Iterator[VideoFrame], tolerance: Fraction) -> Iterator[tuple[VideoFrame, Fraction]]:
    """Each frame with the time until which it is shown, in units of the stream."""
    interval = 1
    shown = next(frames)
    for frame in frames:
        assert shown.pts is not None
        assert frame.pts is not None
        interval = frame.pts - shown.pts
        yield shown, frame.pts - tolerance
        shown = frame
    assert shown.pts is not None
    yield shown, Fraction(shown.pts + (shown.duration or interval))


def write_video(
    path: Path, frames: Sequence[Image.Image], *, fps: float, audio: Audio | None = None, comment: str = ""
) -> None:
    """Write RGB frames of one even size as H.264 (yuv420p, BT.709) in an MP4, in one atomic step.

    Args:
        audio: mono or stereo, written as AAC from the first frame on.
        comment: content of the tag ``comment``; empty writes no tag.
    """
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1 or any(side % 2 for size in sizes for side in size):
        raise ValueError(
            f"{path}: frames of one size, width and height even, can be written; got {sorted(sizes)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_frames(
        path,
        enumerate(frames),
        size=frames[0].size,
        rate=Fraction(fps).limit_denominator(1001),
        audio=[] if audio is None else [audio],
        comment=comment,
    )


def write_frames(
    path: Path,
    frames: Iterable[tuple[int, Image.Image]],
    *,
    size: tuple[int, int],
    rate: Fraction,
    time_base: Fraction | None = None,
    audio: Iterable[Audio] = (),
    crf: int = 18,
    comment: str = "",
) -> None:
    """Write a video as :func:`write_video` does, of frames that come one after the other.

    Args:
        frames: time in units of ``time_base``, from 0 on, and image.
        size: of the frames, width and height even.
        rate: frames per second; the mean if it varies.
        time_base: seconds; None is 1 / ``rate``.
        audio: pieces of one form, one after the other.
        crf: constant rate factor of x264: 18 is good, 14 looks like the original.
    """
    codec, options = _encoder()
    # "bitexact" leaves out the time of writing and the encoder's version: equal frames give equal bytes.
    options_of_file = {"fflags": "+bitexact"}
    with (
        replacing(path) as temporary,
        av.open(f"file:{temporary}", "w", format="mp4", options=options_of_file) as container,
    ):
        if comment:
            container.metadata["comment"] = comment
        stream = container.add_stream(codec, rate=rate, options={**options, "crf": str(crf)})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = time_base or 1 / rate
        stream.codec_context.thread_count = 1
        stream.codec_context.colorspace = stream.codec_context.color_primaries = 1  # BT.709
        stream.codec_context.color_trc = stream.codec_context.color_range = 1  # BT.709, limited
        pieces = iter(audio)
        if (first := next(pieces, None)) is not None:
            audio_stream = _audio_stream(container, first)
        for time, image in frames:
            rgb = VideoFrame.from_ndarray(np.asarray(image.convert("RGB")), format="rgb24")
            frame = rgb.reformat(format="yuv420p", dst_colorspace=1, dst_color_range=1)
            frame.pts, frame.time_base = time, time_base or 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if first is not None:
            _encode_audio(container, audio_stream, chain([first], pieces))


def _encoder() -> tuple[str, dict[str, str]]:
    """FFmpeg's name of an encoder that takes a constant rate factor, and its options."""
    for name, options in _ENCODERS.items():
        with suppress(UnknownCodecError):
            Codec(name, "w")
            return name, options
    raise UserError(
        f"the FFmpeg of PyAV {av.__version__} writes no H.264 or H.265 ({', '.join(_ENCODERS)}); install "
        "PyAV's wheel: pip install --force-reinstall --only-binary av av"
    )


def _audio_stream(container: OutputContainer, audio: Audio) -> AudioStream:
    """A stream for AAC, at the sample rate of the audio if AAC supports it."""
    rates = Codec("aac", "w").audio_rates or ()
    rate = audio.sample_rate if audio.sample_rate in rates else _USUAL_RATE
    return container.add_stream("aac", rate=rate, layout=LAYOUTS[len(audio.waveform)], options=_AAC)


def _encode_audio(container: OutputContainer, stream: AudioStream, pieces: Iterable[Audio]) -> None:
    converter: AudioResampler | None = None
    place = 0
    for audio in pieces:
        waveform = audio.waveform.float().clamp(-1, 1).contiguous().numpy()
        layout = LAYOUTS[len(waveform)]
        frame = AudioFrame.from_ndarray(waveform, format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = (
            audio.sample_rate,
            place,
            Fraction(1, audio.sample_rate),
        )
        place += waveform.shape[1]
        converter = converter or AudioResampler(format="fltp", layout=layout, rate=stream.rate)
        for converted in converter.resample(frame):
            container.mux(stream.encode(converted))
    for converted in converter.resample(None) if converter is not None else ():
        if converted is not None:
            container.mux(stream.encode(converted))
    container.mux(stream.encode(None))
