"""This file cuts the audio of a clip out of its file: the time of its frames, in a given form.

Video and audio of a file have one clock. Samples are placed by their time stamps, which Matroska rounds to a
millisecond: before the first, after the last and in gaps there is silence, as when the file is played.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import ceil, floor
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet

from diffsynth_lite.data.video_decoding import FFMPEG, LAYOUTS, clip_start, opened_clip
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Audio, AudioFormat

DECODER_ID = f"v1 libavcodec {FFMPEG['libavcodec']} libswresample {FFMPEG['libswresample']}"
"""All that decides a clip's audio besides its bytes; part of cache keys, so change it with the code."""

_MOST_CHANNELS = 8
"""The most channels for which swresample has a layout."""

_DECODER_OPTIONS = {"err_detect": "crccheck+bitstream+buffer+explode"}

_MARGIN_S = Fraction(1, 20)
"""Audio around a cut that the resampler's filter sees."""

_PRE_ROLL_S = 2
"""Lossy codecs need the packets before a sample; Opus, which needs most, 80 ms."""

_STAMP_TOLERANCE_S = Fraction(2, 1000)
"""Largest error of a time stamp against the samples before it: containers round to a millisecond."""

_MIN_PART = 0.5
"""Part of a clip that the audio of its file must cover to count as the clip's audio."""

_SILENCE = 2.0**-15
"""Peaks below the smallest step of 16 bits are those of a mute track."""

_Samples = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioFacts:
    """Facts of a file's header about its audio.

    Attributes:
        num_channels: 1 is mono, 2 stereo, 6 is 5.1.
    """

    codec: str
    sample_rate: int
    num_channels: int


def check_audio(path: Path) -> AudioFacts | None:
    """Facts of a clip's header about its audio, of which nothing is decoded; None where it has none."""
    with opened_clip(path) as clip:
        stream = _audio_stream(clip.container)
        if stream is None:
            return None
        context = stream.codec_context
        return AudioFacts(
            codec=context.name, sample_rate=context.sample_rate, num_channels=context.layout.nb_channels
        )


def read_audio(path: Path, start_s: float, duration_s: float, form: AudioFormat) -> Audio | None:
    """The audio of a part of a clip.

    Mono becomes both channels alike. More channels than the form has are mixed by swresample's matrix,
    scaled so that nothing is clipped; stereo becomes the mean of both channels.

    Args:
        path: MP4, MOV, Matroska, WebM or AVI.
        start_s: seconds from the frame that is shown first.

    Returns:
        ``round(duration_s * form.sample_rate)`` samples; None where the file has no audio there: its samples
        cover less than half of the part, or all of them are mute.
    """
    shown = clip_start(path)
    start = shown.pts * shown.time_base + Fraction(start_s)
    part = _part(path, start, Fraction(duration_s))
    if part is None:
        return None
    waveform = _resampled(part, start, round(duration_s * form.sample_rate), form)
    if not np.isfinite(waveform).all():
        raise UserError(f"{path}: its audio has numbers that are not finite; save it again")
    if np.abs(waveform).max() < _SILENCE:
        return None
    import torch  # Here, as the facts of a file are read without it.

    return Audio(waveform=torch.from_numpy(waveform), sample_rate=form.sample_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Decoded samples, in the form of the file.

    Attributes:
        samples: (channels, samples).
        first: index of the first sample, counted from time 0.
        rate: samples a second.
        layout: FFmpeg's name of the channels.
    """

    samples: _Samples
    first: int
    rate: int
    layout: str


def _part(path: Path, start: Fraction, duration: Fraction) -> _Part | None:
    """A part of a file with a margin, silent where audio is missing; None where most of it is missing."""
    sought = start - _MARGIN_S - _PRE_ROLL_S
    if sought > 0:
        # Some whole files cannot be sought in; decoding from the start distinguishes them from damage.
        with suppress(UserError):
            return _decoded_part(path, start, duration, sought=sought)
    return _decoded_part(path, start, duration, sought=None)


def _decoded_part(
    path: Path, start: Fraction, duration: Fraction, *, sought: Fraction | None
) -> _Part | None:
    with opened_clip(path) as clip, closing(_frames(clip.container, sought)) as frames:
        head = next(frames, None)
        if head is None:
            return None
        if sought is not None and _time(head) > start - _MARGIN_S:
            raise UserError("seeking leads to a later time")
        rate, layout, num_channels = head.sample_rate, head.layout.name, head.layout.nb_channels
        if num_channels > _MOST_CHANNELS:
            raise UserError(
                f"its audio has {num_channels} channels, of which {_MOST_CHANNELS} are mixed at most"
            )
        first, last = floor((start - _MARGIN_S) * rate), ceil((start + duration + _MARGIN_S) * rate)
        samples = np.zeros((num_channels, last - first), dtype=np.float32)
        wanted = range(round(start * rate), round((start + duration) * rate))
        num_there = 0
        for place, values in _placed(chain([head], frames)):
            if place >= last:
                break
            low, high = max(place, first), min(place + values.shape[1], last)
            if low < high:
                samples[:, low - first : high - first] = values[:, low - place : high - place]
            num_there += max(0, min(high, wanted.stop) - max(low, wanted.start))
    if num_there < _MIN_PART * len(wanted):
        return None
    return _Part(samples=samples, first=first, rate=rate, layout=layout)


def _placed(frames: Iterable[AudioFrame]) -> Iterator[tuple[int, _Samples]]:
    """The samples of each frame, (channels, samples), and the number of the first, counted from time 0."""
    end: int | None = None
    form: tuple[int, str] | None = None
    converter: AudioResampler | None = None
    for frame in frames:
        if form not in (None, (frame.sample_rate, frame.layout.name)):
            raise UserError("its audio changes its sample rate or channels; save it again")
        form = frame.sample_rate, frame.layout.name
        place = round(_time(frame) * frame.sample_rate)
        tolerance = max(_STAMP_TOLERANCE_S, frame.time_base or Fraction()) * frame.sample_rate
        if end is not None and abs(place - end) <= tolerance:
            place = end
        converter = converter or AudioResampler(format="fltp", layout=frame.layout, rate=frame.sample_rate)
        values = _joined(converter.resample(frame))
        yield place, values
        end = place + values.shape[1]


def _frames(container: InputContainer, sought: Fraction | None) -> Generator[AudioFrame, None, None]:
    """Decoded audio from a time on, or a little before it, or from the start."""
    stream = _audio_stream(container)
    if stream is None:
        return
    assert stream.time_base is not None
    if sought is not None:
        container.seek(floor(sought / stream.time_base), stream=stream)
    last: Packet[AudioStream] | None = None
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise UserError("its audio is damaged or cut off")
        last = last if packet.dts is None else packet
        try:
            frames = packet.decode()
        except av.error.InvalidDataError as error:
            raise UserError("its audio is damaged") from error
        for frame in frames:
            if frame.is_corrupt:
                raise UserError("its audio is damaged")
            yield frame
    if _lacks_packets(container, stream, last):
        raise UserError("its audio is cut off")


def _lacks_packets(
    container: InputContainer, stream: AudioStream, last: "Packet[AudioStream] | None"
) -> bool:
    """Whether the index of a file, where it lists all packets, lists some after the last one read."""
    is_avi = container.format.name == "avi"
    if not (is_avi or "mp4" in container.format.name) or not len(stream.index_entries):
        return False
    promised = stream.index_entries[-1]
    if last is None:
        return True
    if is_avi:  # its index counts samples in bytes, or in blocks
        return last.pos is None or last.pos + last.size < promised.pos + promised.size
    return last.dts is None or last.dts < promised.timestamp


def _audio_stream(container: InputContainer) -> AudioStream | None:
    stream = container.streams.best("audio")
    if stream is None:
        return None
    if not isinstance(stream, AudioStream) or stream.codec_context is None:
        raise UserError(
            "its audio is of a kind that cannot be decoded; save it as AAC, or set data.audio: false"
        )
    stream.codec_context.options = dict(_DECODER_OPTIONS)
    stream.codec_context.thread_count = 1
    return stream


def _time(frame: AudioFrame) -> Fraction:
    if frame.pts is None or frame.time_base is None:
        raise UserError("its audio has no time stamps; save it again")
    return frame.pts * Fraction(frame.time_base)


def _resampled(part: _Part, start: Fraction, num_samples: int, form: AudioFormat) -> _Samples:
    """(channels, samples), from ``start`` on, exact to half a sample."""
    # swresample would make mono quieter: it treats it as a centre channel between two speakers.
    layout = "mono" if len(part.samples) == 1 else LAYOUTS[form.num_channels]
    # Channels mixed to floats would add up to more than 1; for integers swresample scales them.
    sample_format = "fltp" if len(part.samples) in (1, form.num_channels) else "s32p"
    frame = AudioFrame.from_ndarray(part.samples, format="fltp", layout=part.layout)
    frame.sample_rate, frame.pts, frame.time_base = part.rate, 0, Fraction(1, part.rate)
    resampler = AudioResampler(format=sample_format, layout=layout, rate=form.sample_rate)
    waveform = _joined([*resampler.resample(frame), *resampler.resample(None)])
    offset = round((start - Fraction(part.first, part.rate)) * form.sample_rate)
    cut = waveform[:, offset : offset + num_samples]
    filled = np.zeros((form.num_channels, num_samples), dtype=np.float32)
    filled[:, : cut.shape[1]] = cut
    return filled


def _joined(frames: Iterable[AudioFrame | None]) -> _Samples:
    found = [frame.to_ndarray() for frame in frames if frame is not None]
    scale = 2.0**-31 if found[0].dtype == np.int32 else 1.0
    return np.concatenate(found, axis=1).astype(np.float32) * np.float32(scale)
