"""This file decodes clips strictly: every frame that a file promises is decoded, in order, or it is an error.

FFmpeg conceals damage: a frame that cannot be decoded is left out or filled with grey. So each packet is
compared with the frame it must give, decoders stop at the first fault, and clips that would come out with
wrong colours or a wrong shape (HDR, interlaced, transparent, not square) are refused by name.
"""

import errno
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, TypeAlias

import av
from av.buffer import Buffer
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream
from PIL import Image

from diffsynth_lite.data.images import MAX_PIXELS
from diffsynth_lite.errors import UserError

VideoPacket: TypeAlias = "Packet[VideoStream]"

FFMPEG = {name: version[0] for name, version in av.library_versions.items()}
"""Major versions of FFmpeg's libraries."""
LAYOUTS = {1: "mono", 2: "stereo"}
"""FFmpeg's name of the layout, by the number of channels."""

_OPEN_OPTIONS = {
    # A playlist called .mp4 would open other files and addresses.
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi",
    "protocol_whitelist": "file",
    "err_detect": "explode",
}
_DECODER_OPTIONS = {"err_detect": "crccheck+bitstream+buffer+explode", "max_pixels": str(MAX_PIXELS)}

_OF_THE_MACHINE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Failures without fault of the clip, except perhaps EIO, which FFmpeg also returns for truncated files."""

_PROGRESSIVE = (0, 1)  # AVFieldOrder: unknown, progressive
_SQUARE = (Fraction(98, 100), Fraction(102, 100))

_MATRICES = frozenset({0, 1, 2, 4, 5, 6, 7, 9})  # AVColorSpace; 2, unknown, is taken for BT.601
_HDR_TRANSFERS = {16: "PQ", 18: "HLG"}  # AVColorTransferCharacteristic

# Chroma is interpolated (the fast path repeats it) and the same bits come out on every processor.
_CONVERSION = (
    Interpolation.BILINEAR
    | Interpolation.ACCURATE_RND
    | Interpolation.FULL_CHR_H_INT
    | Interpolation.BITEXACT
)

_UPRIGHT: dict[tuple[float, float, float, float], Image.Transpose | None] = {
    (1, 0, 0, 1): None,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
}
"""Entries a, b, c, d of a display matrix (x' = a x + c y, y' = b x + d y) to the fitting transposition."""

CHUNK_HEADER_BYTES = 8
"""Header before the data of each chunk of an AVI."""

_SEEK_BACK_S = (0, 2, 10)
"""A container may seek by decoding time and find a keyframe shown too late: go further back, then to 0."""


@dataclass(frozen=True, slots=True)
class OpenClip:
    """An open file and the stream of its image."""

    container: InputContainer
    stream: VideoStream


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipStart:
    """The frame shown first: its time in units of ``time_base`` seconds, and its size as shown, in pixels."""

    pts: int
    time_base: Fraction
    width: int
    height: int


@contextmanager
def opened_clip(path: Path) -> Iterator[OpenClip]:
    """Open a clip with its header checked; an error of FFmpeg inside becomes one that names the file.

    Raises:
        MemoryError: there was too little memory; the clip may be good.
        OSError: too many files are open; the clip may be good.
    """
    try:
        with _opened_container(path) as container:
            stream = container.streams.best("video")
            _check_stream(container, stream)
            assert isinstance(stream, VideoStream)
            stream.codec_context.options = dict(_DECODER_OPTIONS)
            stream.thread_type = "NONE"
            stream.codec_context.thread_count = 1
            yield OpenClip(container, stream)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error.__cause__
    except av.error.FFmpegError as error:
        if error.errno in _OF_THE_MACHINE and not _promises_too_much(path):
            raise
        raise UserError(f"{path}: damaged: {error.strerror}") from error


def clip_start(path: Path) -> ClipStart:
    """Decode the frame that is shown first; the times of a clip count from it."""
    with opened_clip(path) as clip:
        for frame in _decoded(_from_start(clip)):
            turned = transposition(frame) in tuple(_UPRIGHT.values())[4:]
            width, height = (frame.height, frame.width) if turned else (frame.width, frame.height)
            return ClipStart(pts=_time(frame), time_base=_time_base(clip), width=width, height=height)
        raise UserError("holds no frame")


def frames_from(path: Path, pts: int, *, first_pts: int) -> Generator[VideoFrame, None, None]:
    """Decode frames in the order of their times, from a keyframe at or before ``pts`` to the end.

    Args:
        path: MP4, MOV, Matroska, WebM or AVI.
        pts: time of the wanted frame, in the stream's units.
        first_pts: time of the frame shown first.
    """
    with opened_clip(path) as clip:
        packets = _sought(clip, pts, first_pts)
        if packets is not None:
            yield from _decoded(packets)
            return
    yield from all_frames(path)


def all_frames(path: Path) -> Generator[VideoFrame, None, None]:
    """Decode every frame in the order of their times."""
    with opened_clip(path) as clip:
        yield from _decoded(_from_start(clip))


def timed(clip: OpenClip, packets: Iterable["Packet[Any]"]) -> Iterator["Packet[Any]"]:
    """Packets of a clip; video packets of an AVI get the times at which their frames are shown.

    An AVI has no times: each chunk lasts for one frame, and one without data repeats the frame before it.
    FFmpeg (libavformat 62.12) takes the next chunk's time for that of a frame of H.264, and after a seek may
    count empty chunks twice; its index is right.
    """
    if clip.container.format.name != "avi":
        yield from packets
        return
    times = {entry.pos + CHUNK_HEADER_BYTES: entry.timestamp for entry in clip.stream.index_entries}
    for packet in packets:
        if packet.stream_index == clip.stream.index and packet.dts is not None:
            packet.pts = packet.dts = times.get(packet.pos or 0, packet.dts)
        yield packet


def is_shown(packet: "Packet[Any]") -> bool:
    """Whether a packet's frame is shown, and not only a reference for others or cut by an edit list."""
    if packet.is_discard or not packet.size:
        return False
    # VP8 keeps its "alternate reference" frames in packets of their own; bit 4 is set where one is shown
    # (RFC 6386, section 9.1).
    return packet.stream.codec_context.name != "vp8" or bool(bytes(packet)[0] & 0x10)


def _opened_container(path: Path) -> InputContainer:
    try:
        # "file:" because FFmpeg would take a name with a colon in it for an address.
        return av.open(f"file:{path}", options=dict(_OPEN_OPTIONS), metadata_errors="replace")
    except (av.error.InvalidDataError, av.error.ArgumentError) as error:
        raise UserError("damaged, cut off, or not an MP4, MOV, Matroska, WebM or AVI clip") from error
    except av.error.FFmpegError as error:
        if error.errno in _OF_THE_MACHINE:
            raise
        raise UserError(f"cannot be opened: {error.strerror}") from error


def _promises_too_much(path: Path) -> bool:
    """Whether the index of a file lists a frame larger than the file, for which no memory would be enough."""
    num_bytes = path.stat().st_size
    with _opened_container(path) as container:
        streams = container.streams.video
        return any(not 0 <= entry.size <= num_bytes for one in streams for entry in one.index_entries)


def _check_stream(container: InputContainer, stream: object) -> None:
    if not isinstance(stream, VideoStream) or Disposition.attached_pic in stream.disposition:
        raise UserError("holds no video stream")
    context = stream.codec_context
    if context is None or context.format is None:
        raise UserError("its images are of a kind that cannot be decoded, or damaged; save it as H.264")
    if context.width * context.height > MAX_PIXELS:
        raise UserError(f"{context.width} x {context.height} pixels a frame; at most {MAX_PIXELS} are read")
    ratio = stream.sample_aspect_ratio
    if ratio and not _SQUARE[0] <= ratio <= _SQUARE[1]:
        raise UserError(f"its pixels are not square ({ratio}); scale it to square pixels")
    tags = {name.lower(): value for name, value in stream.metadata.items()}
    # Only the tag shows the alpha of a WebM: FFmpeg's decoders leave it out.
    if tags.get("alpha_mode") == "1" or any(part.is_alpha for part in context.format.components):
        raise UserError("has transparency; save it over the background that is meant")
    if context.field_order not in _PROGRESSIVE:
        raise UserError(_INTERLACED)
    if container.format.name == "avi" and context.has_b_frames:
        raise UserError("an AVI file does not record when its B-frames are shown; save it as MP4")
    check_colours(context.color_trc, context.colorspace)


_INTERLACED = "is interlaced; deinterlace it, for example with ffmpeg -vf bwdif"


def _from_start(clip: OpenClip) -> Iterator[VideoPacket]:
    """All packets. The first must be a keyframe; a damaged one is not recognised as one."""
    packets = timed(clip, clip.container.demux(clip.stream))
    first = next(packets)
    if first.size and not first.is_keyframe:
        raise UserError("damaged or cut at its start, which is not a keyframe; encode it again")
    return _from_keyframe(chain([first], packets))


def _sought(clip: OpenClip, pts: int, first_pts: int) -> Iterator[VideoPacket] | None:
    """Packets from the keyframe before ``pts``, or None where only the start of the file is early enough."""
    for back_s in _SEEK_BACK_S:
        target = pts - int(back_s / _time_base(clip))
        if target <= first_pts:
            return None
        clip.container.seek(target, stream=clip.stream)
        packets = _from_keyframe(timed(clip, clip.container.demux(clip.stream)))
        keyframe = next(packets, None)
        if keyframe is not None and keyframe.pts is not None and keyframe.pts <= pts:
            return chain([keyframe], packets)
    return None


def _from_keyframe(packets: Iterable[VideoPacket]) -> Iterator[VideoPacket]:
    """Packets from the first keyframe on, without those shown before it: they refer to missing frames."""
    start: int | None = None
    for packet in takewhile(lambda packet: packet.size or packet.dts is not None, packets):
        if start is None and packet.is_keyframe:
            start = _time(packet)
        if start is not None and _time(packet) >= start:
            yield packet


def _decoded(packets: Iterable[VideoPacket]) -> Iterator[VideoFrame]:
    """Frames of the packets that are shown, in the order of their times."""
    due: list[int] = []
    stream: VideoStream | None = None
    size: tuple[int, int] | None = None
    for packet in packets:
        stream = packet.stream
        if is_shown(packet):
            heappush(due, _time(packet))
        for frame in packet.decode() if packet.size else ():
            _check_frame(frame, due, size)
            size = (frame.width, frame.height)
            yield frame
    for frame in stream.decode(None) if stream is not None else ():
        assert stream is not None
        frame.time_base = stream.time_base  # PyAV 18.1 sets it for the frames of packets only
        _check_frame(frame, due, size)
        yield frame
    if due:
        raise UserError(f"damaged: {len(due)} frames are missing at its end")


def _check_frame(frame: VideoFrame, due: list[int], size: tuple[int, int] | None) -> None:
    if frame.is_corrupt or not due or heappop(due) != frame.pts:
        raise UserError(f"damaged: a frame is missing or broken near its time {frame.pts}")
    if size is not None and size != (frame.width, frame.height):
        raise UserError(
            f"changes its size from {size[0]} x {size[1]} to {frame.width} x {frame.height} pixels"
        )
    if frame.interlaced_frame:
        raise UserError(_INTERLACED)
    check_colours(frame.color_trc, frame.colorspace)
    transposition(frame)


def _time(item: "VideoPacket | VideoFrame") -> int:
    if item.pts is None:
        raise UserError("holds a frame without a time")
    return item.pts


def _time_base(clip: OpenClip) -> Fraction:
    assert clip.stream.time_base is not None
    return clip.stream.time_base


def rgb_image(frame: VideoFrame) -> Image.Image:
    """The image of a frame, upright, as RGB with 8 bits a channel.

    Colours are converted by the matrix and range that the file names; one that names none is taken, as by
    FFmpeg, to be BT.601 of limited range.
    """
    rgb = frame.reformat(format="rgb24", interpolation=_CONVERSION, threads=1)
    image = Image.fromarray(rgb.to_ndarray())
    method = transposition(frame)
    return image if method is None else image.transpose(method)


def check_colours(transfer: int, matrix: int) -> None:
    """Check the transfer function and matrix of a clip, numbers of H.273."""
    if transfer in _HDR_TRANSFERS:
        raise UserError(f"is HDR ({_HDR_TRANSFERS[transfer]}); map it to SDR (BT.709) first")
    if matrix not in _MATRICES:
        raise UserError(f"its colours (matrix {matrix} of H.273) cannot be converted; save it as BT.709")


def transposition(frame: VideoFrame) -> Image.Transpose | None:
    """The transposition that makes a stored frame upright; None if it is upright already."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return None
    assert isinstance(matrix, Buffer)
    entries = memoryview(bytes(matrix)).cast("i")
    a, b, c, d = (round(entries[index] / 2**16, 2) for index in (0, 1, 3, 4))
    if (a, b, c, d) not in _UPRIGHT:
        raise UserError("is shown at an angle that is not a multiple of 90 degrees; save it upright")
    return _UPRIGHT[a, b, c, d]
