"""This file writes frames as a clip that every player shows with the right colours."""

import uuid
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.frame import VideoFrame
from PIL import Image

# x264 spends bits differently from run to run under adaptive quantisation (seen with x264 165).
_X264 = {"crf": "18", "preset": "veryfast", "aq-mode": "none", "mbtree": "0"}


def write_video(path: Path, frames: Sequence[Image.Image], *, fps: float) -> None:
    """Write RGB frames of one even size as H.264 (yuv420p, BT.709) in an MP4, in one atomic step.

    Raises:
        ValueError: no frames, or frames of unequal or odd sizes.
    """
    sizes = {frame.size for frame in frames}
    if len(sizes) != 1 or any(side % 2 for size in sizes for side in size):
        raise ValueError(
            f"{path}: frames of one size, width and height even, can be written; got {sorted(sizes)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{uuid.uuid4().hex}.tmp"
    try:
        _encode(aside, frames, Fraction(fps).limit_denominator(1001))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _encode(path: Path, frames: Sequence[Image.Image], rate: Fraction) -> None:
    # "bitexact" leaves out the time of writing and the encoder's version: equal frames give equal bytes.
    with av.open(f"file:{path}", "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264", rate=rate, options=_X264)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        stream.codec_context.colorspace = stream.codec_context.color_primaries = 1  # BT.709
        stream.codec_context.color_trc = stream.codec_context.color_range = 1  # BT.709, limited
        for image in frames:
            frame = VideoFrame.from_ndarray(np.asarray(image.convert("RGB")), format="rgb24")
            container.mux(
                stream.encode(frame.reformat(format="yuv420p", dst_colorspace=1, dst_color_range=1))
            )
        container.mux(stream.encode(None))
