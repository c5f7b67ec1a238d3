"""This file turns a decoded frame of a clip into an upright RGB image, and refuses what would be wrong."""

from av.buffer import Buffer
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation
from PIL import Image

from diffsynth_lite.errors import UserError

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
"""Entries a, b, c, d of a display matrix (x' = a x + c y, y' = b x + d y), and what shows it upright."""


def rgb_image(frame: VideoFrame) -> Image.Image:
    """The picture of a frame, upright, as RGB with 8 bits a channel.

    Colours are converted by the matrix and range that the file names; one that names none is taken, as by
    FFmpeg, to be BT.601 of limited range.
    """
    rgb = frame.reformat(format="rgb24", interpolation=_CONVERSION, threads=1)
    image = Image.fromarray(rgb.to_ndarray())
    method = transposition(frame)
    return image if method is None else image.transpose(method)


def check_colours(transfer: int, matrix: int) -> None:
    """Check the transfer function and matrix of a clip, numbers of H.273.

    Raises:
        UserError: colours of that kind cannot be converted to RGB with 8 bits.
    """
    if transfer in _HDR_TRANSFERS:
        raise UserError(f"is HDR ({_HDR_TRANSFERS[transfer]}); map it to SDR (BT.709) first")
    if matrix not in _MATRICES:
        raise UserError(f"its colours (matrix {matrix} of H.273) cannot be converted; save it as BT.709")


def transposition(frame: VideoFrame) -> Image.Transpose | None:
    """What brings a frame as stored to how it is shown; None: nothing.

    Raises:
        UserError: it is shown at an angle that is no multiple of 90 degrees.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return None
    assert isinstance(matrix, Buffer)
    entries = memoryview(bytes(matrix)).cast("i")
    a, b, c, d = (round(entries[index] / 2**16, 2) for index in (0, 1, 3, 4))
    if (a, b, c, d) not in _UPRIGHT:
        raise UserError("is shown at an angle that is no multiple of 90 degrees; save it upright")
    return _UPRIGHT[a, b, c, d]


def upright_size(frame: VideoFrame) -> tuple[int, int]:
    """Width and height of a frame as it is shown, in pixels."""
    turned = tuple(_UPRIGHT.values())[4:]
    return (frame.height, frame.width) if transposition(frame) in turned else (frame.width, frame.height)
