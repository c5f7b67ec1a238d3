"""Makers of small clips of known content for the tests, written with PyAV."""

import os
import struct
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.container import OutputContainer
from av.video.frame import VideoFrame

WIDTH, HEIGHT = 64, 48
REPEATABLE = {"aq-mode": "none", "mbtree": "0"}
"""Without adaptive quantisation x264 gives the same bytes each time."""
BT709, BT601, LIMITED, FULL, PQ, HLG = 1, 5, 1, 2, 16, 18


def pattern(index: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Frame ``index``: grey of brightness 5 + 5 x index (up to 48 differ), red, green and blue corners."""
    image = np.full((height, width, 3), 5 + 5 * index % 240, np.uint8)
    image[:16, :16] = (255, 0, 0)
    image[:16, -16:] = (0, 255, 0)
    image[-16:, :16] = (0, 0, 255)
    return image


def index_shown(image) -> int:
    """Which `pattern` an image shows, by the grey of its middle."""
    pixels = np.asarray(image)
    middle = pixels[pixels.shape[0] // 2, pixels.shape[1] // 2]
    return round((float(middle.mean()) - 5) / 5)


def write_clip(
    path: Path,
    *,
    num_frames: int = 25,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    rate: Fraction | int = 25,
    times: Sequence[int] | None = None,
    time_base: Fraction | None = None,
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    turn: tuple[float, bool, bool] | None = None,
    matrix: int = BT709,
    color_range: int = LIMITED,
    tagged: bool = True,
    transfer: int | None = None,
    aspect: Fraction | None = None,
    metadata: dict[str, str] | None = None,
    keyframe_every: int = 8,
    images: Iterable[np.ndarray] | None = None,
) -> Path:
    """Encode `pattern` frames; ``times`` are in units of ``time_base`` (default: 1 / rate)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    time_base = time_base or 1 / Fraction(rate)
    frames = list(images) if images is not None else [pattern(i, *size) for i in range(num_frames)]
    with av.open(str(path), "w", options=container or {}) as file:
        settings = {"g": str(keyframe_every)} | (REPEATABLE if codec == "libx264" else {}) | (options or {})
        stream = file.add_stream(codec, rate=rate, options=settings)
        stream.width, stream.height = frames[0].shape[1], frames[0].shape[0]
        stream.pix_fmt = pixels
        stream.time_base = stream.codec_context.time_base = time_base
        stream.codec_context.thread_count = 1
        stream.metadata.update(metadata or {})
        if tagged:
            stream.codec_context.colorspace, stream.codec_context.color_range = matrix, color_range
        if transfer is not None:
            stream.codec_context.color_trc = transfer
        if aspect is not None:
            stream.codec_context.sample_aspect_ratio = aspect
        if turn is not None:
            stream.set_display_rotation(turn[0], hflip=turn[1], vflip=turn[2])
        for index, image in enumerate(frames):
            frame = VideoFrame.from_ndarray(image, format="rgb24")
            frame = frame.reformat(format=pixels, dst_colorspace=matrix, dst_color_range=color_range)
            frame.pts, frame.time_base = (index if times is None else times[index]), time_base
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    if codec == "libsvtav1" and hasattr(os, "sched_setscheduler"):
        # As root it takes real-time priority, for this thread and for all that it starts later.
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return path


LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


def write_audio_clip(
    path: Path,
    waveform: np.ndarray | None,
    *,
    rate: int = 16000,
    codec: str = "pcm_s16le",
    sound_start: float = 0.0,
    gap: tuple[float, float] | None = None,
    video_start: float = 0.0,
    seconds: float = 2.0,
) -> Path:
    """Ten small frames a second, and a track of audio, (channels, samples), where there is one.

    Args:
        sound_start: seconds at which the track begins, as the images do at ``video_start``.
        gap: seconds into the track from which on it is late, and by how much.
    """
    with av.open(str(path), "w") as file:
        video = file.add_stream("libx264", rate=10, options={**REPEATABLE, "bf": "0"})
        video.width, video.height, video.pix_fmt = 32, 32, "yuv420p"
        video.codec_context.thread_count = 1
        if waveform is not None:
            layout = LAYOUTS[len(waveform)]
            sound = file.add_stream(codec, rate=rate)
            sound.codec_context.layout = layout
        for index in range(round(seconds * 10)):
            frame = VideoFrame.from_ndarray(pattern(index, 32, 32), format="rgb24")
            frame.pts, frame.time_base = index + round(10 * video_start), Fraction(1, 10)
            file.mux(video.encode(frame.reformat(format="yuv420p")))
        file.mux(video.encode(None))
        if waveform is not None:
            converter = av.AudioResampler(sound.codec_context.format.name, layout, rate)
            start = round(sound_start * rate)
            for first in range(0, waveform.shape[1], 1024):
                block = np.ascontiguousarray(waveform[:, first : first + 1024], dtype=np.float32)
                frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
                late = round(gap[1] * rate) if gap is not None and first >= gap[0] * rate else 0
                frame.sample_rate, frame.pts, frame.time_base = rate, start + first + late, Fraction(1, rate)
                for converted in converter.resample(frame):
                    file.mux(sound.encode(converted))
            file.mux(sound.encode(None))
    return path


def write_avi(
    path: Path,
    *,
    slots: Sequence[int] = range(25),
    codec: str = "mpeg4",
    tag: str | None = None,
    waveform: np.ndarray | None = None,
    rate: int = 44100,
    audio_codec: str = "libmp3lame",
) -> Path:
    """`pattern` frames in an AVI of 25 frames a second, a keyframe every 8, and an audio track.

    FFmpeg writes an empty chunk for each slot that no frame has. It does so for the second slot of all that
    have MP3, too, and moves the frames after it: MP3 begins before time 0.

    Args:
        slots: of each frame.
        waveform: (1, samples); None for no track.
    """
    with av.open(str(path), "w") as file:
        options = {**REPEATABLE, "bf": "0"} if codec == "libx264" else {"b": "4000000"}
        video = file.add_stream(codec, rate=25, options={"g": "8", **options})
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        video.codec_context.thread_count = 1
        if tag is not None:
            video.codec_context.codec_tag = tag
        audio = None if waveform is None else file.add_stream(audio_codec, rate=rate, layout="mono")
        for index, slot in enumerate(slots):
            frame = VideoFrame.from_ndarray(pattern(index), format="rgb24")
            frame.pts, frame.time_base = slot, Fraction(1, 25)
            file.mux(video.encode(frame.reformat(format="yuv420p")))
        file.mux(video.encode(None))
        if audio is not None:
            frame = av.AudioFrame.from_ndarray(waveform, format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
            size = (
                audio.codec_context.frame_size or rate // 2
            )  # large chunks: a seek begins far before the frame
            converter = av.AudioResampler(audio.codec_context.format.name, "mono", rate, size)
            for converted in (*converter.resample(frame), *converter.resample(None)):
                file.mux(audio.encode(converted))
            file.mux(audio.encode(None))
    return path


def index_of_avi(path: Path) -> tuple[int, list[tuple[bytes, int, int, int]]]:
    """Where the index of an AVI begins, and its entries: name, flags, place, size."""
    content = path.read_bytes()
    start = content.rindex(b"idx1") + 8
    size = struct.unpack_from("<I", content, start - 4)[0]
    return start, list(struct.iter_unpack("<4sIII", content[start : start + size]))


def avi_slots(path: Path) -> list[int]:
    """The slot of each frame of an AVI, by its chunks: those without data have none."""
    content = path.read_bytes()
    place, sizes = content.index(b"movi") + 4, []
    while (name := content[place : place + 4]) in (b"00dc", b"01wb", b"JUNK"):
        size = struct.unpack_from("<I", content, place + 4)[0]
        sizes += [size] if name == b"00dc" else []
        place += 8 + size + size % 2
    return [slot for slot, size in enumerate(sizes) if size]


def packets_of(path: Path) -> list[dict[str, Any]]:
    """The packets of a clip's image as values, to be written again changed."""
    with av.open(str(path)) as file:
        return [
            {"data": bytes(p), "pts": p.pts, "dts": p.dts, "key": p.is_keyframe, "duration": p.duration}
            for p in file.demux(file.streams.video[0])
            if p.size
        ]


def remux(
    source: Path,
    target: Path,
    packets: list[dict[str, Any]],
    container: dict[str, str] | None = None,
    *,
    silence_s: float = 0.0,
    codec: str = "aac",
) -> Path:
    """Write ``packets`` under the header of ``source`` without encoding.

    Args:
        silence_s: length of a second track, in ``codec``; 0 for none.
    """
    with av.open(str(source)) as original, av.open(str(target), "w", options=container or {}) as file:
        stream = file.add_stream_from_template(original.streams.video[0])
        if silence_s:
            _add_silence(file, codec, seconds=silence_s)
        for values in packets:
            packet = av.Packet(values["data"])
            packet.pts, packet.dts, packet.duration = values["pts"], values["dts"], values["duration"]
            packet.is_keyframe, packet.stream = values["key"], stream
            packet.time_base = original.streams.video[0].time_base
            file.mux(packet)
    return target


def write_audio(path: Path) -> Path:
    """A second of silence."""
    with av.open(str(path), "w") as file:
        _add_silence(file, "aac", seconds=1.024)
    return path


def _add_silence(file: OutputContainer, codec: str, *, seconds: float) -> None:
    stream = file.add_stream(codec, rate=16000, layout="mono")
    stream.codec_context.open()
    size = stream.codec_context.frame_size
    for index in range(round(seconds * 16000 / size)):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, size), np.float32), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = 16000, index * size
        file.mux(stream.encode(frame))
    file.mux(stream.encode(None))


def decode_all(path: Path) -> list[tuple[Fraction, np.ndarray]]:
    """The reference: every frame with its time from the first, decoded from the start by PyAV itself.

    Of an AVI the times are those of its chunks.
    """
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        frames = list(file.decode(stream))
        is_avi = file.format.name == "avi"
    pts = avi_slots(path) if is_avi else [frame.pts for frame in frames]
    times = [(place - pts[0]) * stream.time_base for place in pts]
    return [(time, frame.to_ndarray(format="rgb24")) for time, frame in zip(times, frames, strict=True)]
