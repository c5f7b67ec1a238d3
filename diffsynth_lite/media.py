"""This file holds decoded media: the input of encoders, generated previews, and images to be shown."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import PIL.Image
from PIL.Image import Image

if TYPE_CHECKING:
    import torch

_Value = TypeVar("_Value")

STRIP_FRAMES = 5
_SQUARE_PX = 8
_LIGHT_SQUARES, _DARK_SQUARES = (255, 255, 255, 255), (204, 204, 204, 255)

RecordKind = Literal["image", "video", "edit", "image_to_video", "control", "inpaint", "layers"]
"""What an item of a data set is: an image, a clip, images to edit with their target, a clip with its first
or last frame, an image or clip with one that guides it, one with a mask of what is regenerated, an image
with its layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """What an image was, and where in it its crop lies, after it was resized to cover the training size.

    Attributes:
        original_width: of the upright image before, in pixels, as is ``original_height``.
        left: pixels of the resized image that lie left of the crop, as ``top`` lie above it.
    """

    original_width: int
    original_height: int
    left: int = 0
    top: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioFormat:
    """The form in which a family takes and makes audio.

    Attributes:
        sample_rate: samples a second.
        num_channels: 1, or 2, left and right.
    """

    sample_rate: int
    num_channels: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Audio:
    """Audio.

    Attributes:
        waveform: (channels, samples), in [-1, 1] where nothing is clipped, fp32, on the CPU.
        sample_rate: samples a second.
    """

    waveform: "torch.Tensor"
    sample_rate: int

    @classmethod
    def silent(cls, form: AudioFormat, duration_s: float) -> "Audio":
        """Silence of this length."""
        import torch  # Here, as the screen shows media without it.

        num_samples = round(duration_s * form.sample_rate)
        return cls(waveform=torch.zeros(form.num_channels, num_samples), sample_rate=form.sample_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipWithAudio:
    """A clip that was generated with its audio.

    Attributes:
        frames: RGB, all of one size.
    """

    frames: list[Image]
    audio: Audio


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """The decoded media of one item: upright, cropped, at the training size.

    Attributes:
        frames: RGB, all of one size; one for an image.
        inputs: RGB images that an edit starts from, each of a size of its own.
        layers: RGBA images of the frames' size that the frame is split into, the one at the bottom
            first.
        first_frame: RGB of the frames' size; None where the item names none, as with ``last_frame``.
        mask: mode "L" of the frames' size: 255 counts in the loss, 0 does not. None: all counts.
        control: RGB of the frames' size, as many: what guides each of them; empty where nothing does.
        inpaint_mask: mode "L" of the frames' size, as many: 255 where each is regenerated, 0 where it stays;
            empty where there is none.
        face: RGB, as many as the frames, of a size of their own: the face in each; empty where there is none.
        fps: frames per second of a clip; None for an image.
        crop: of an image; None for a clip, and where it was neither resized nor cropped.
        audio: audio of a clip while its frames are shown, in the family's form, as long as they are; None
            where it is not asked for, or the file has none then.
    """

    frames: tuple[Image, ...]
    inputs: tuple[Image, ...] = ()
    layers: tuple[Image, ...] = ()
    first_frame: Image | None = None
    last_frame: Image | None = None
    mask: Image | None = None
    control: tuple[Image, ...] = ()
    inpaint_mask: tuple[Image, ...] = ()
    face: tuple[Image, ...] = ()
    fps: float | None = None
    crop: Crop | None = None
    audio: Audio | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """The input of a prompt encoder.

    Attributes:
        text: the caption.
        images: RGB images that it sees next to the text, in families that edit.
        is_negative: whether guidance steers away from it: the negative prompt of a preview, and the empty
            caption that replaces a dropped one. Some pipelines encode these in another way.
    """

    text: str
    images: tuple[Image, ...] = ()
    is_negative: bool = False


Generated = list[Image] | ClipWithAudio
"""One preview: the frames of a clip, or an image as a clip of one frame; or a clip with its audio."""


def frames_of(generated: Generated) -> list[Image]:
    """The generated images."""
    return generated.frames if isinstance(generated, ClipWithAudio) else generated


def evenly_spread(values: Sequence[_Value], count: int) -> list[_Value]:
    """At most so many of some values, evenly spread, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(place * (len(values) - 1) / max(1, count - 1))] for place in range(count)]


def frame_strip(frames: Sequence[Image]) -> Image:
    """An image of a clip: up to five of its frames side by side, evenly spread; a single frame is itself.

    Of layers, which are RGBA, all are there, over a checkerboard.
    """
    are_layers = frames[0].mode == "RGBA"
    shown = list(frames) if are_layers else evenly_spread(frames, STRIP_FRAMES)
    width, height = frames[0].size
    strip = PIL.Image.new("RGB", (len(shown) * width, height))
    for place, frame in enumerate(shown):
        strip.paste(opaque(frame), (place * width, 0))
    return strip


def opaque(image: Image) -> Image:
    """An image as RGB; what shows through it is a checkerboard."""
    if image.mode != "RGBA":
        return image.convert("RGB")
    width, height = image.size
    board = PIL.Image.new("RGBA", image.size, _LIGHT_SQUARES)
    dark = PIL.Image.new("RGBA", (_SQUARE_PX, _SQUARE_PX), _DARK_SQUARES)
    for top in range(0, height, _SQUARE_PX):
        for left in range(top % (2 * _SQUARE_PX), width, 2 * _SQUARE_PX):
            board.paste(dark, (left, top))
    return PIL.Image.alpha_composite(board, image).convert("RGB")


def jpeg_url(image: Image) -> str:
    """An image as a JPEG in a data URL: the same text for the same image."""
    file = io.BytesIO()
    opaque(image).save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
