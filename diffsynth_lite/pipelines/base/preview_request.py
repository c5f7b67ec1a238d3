"""This file describes a preview to generate, and the conditioning of a sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image

from diffsynth_lite.progress_log import ProgressLog

Conditioning = dict[str, torch.Tensor]
"""What one sample is conditioned on (prompt embeddings and the like), without a batch axis, on the CPU."""


class Code(str):
    """A value that a program holds as it is written here, such as a call that reads an image."""

    __slots__ = ()
    __repr__ = str.__str__


INPUT_IMAGE = Code('load_image("input.png")')
"""The image that a preview starts from."""
LANCZOS = "Image.Resampling.LANCZOS"


@dataclass(frozen=True, kw_only=True)
class PreviewRequest:
    """One preview: an image or a clip.

    Attributes:
        negative: the encoded negative prompt, for classifier-free guidance.
        inputs: RGB images to edit, the one to split into layers, or the one to start a clip from and, where
            there is one, the one to lead it to; most families have none.
        control: RGB of the preview's size, one a frame: what guides each; empty in most families.
        inpaint_mask: mode "L" of the preview's size, one a frame, too: 255 where it is regenerated, 0
            where the input stays.
        face: RGB, one a frame, of a size of its own: the face in each; empty in most families.
        width: pixels, a multiple of the family's ``size_divisor``, as is ``height``.
        num_frames: of a clip, as ``check_frames`` wants it; 1 is an image.
        fps: frames per second at which a clip is shown; None of families that make images.
        num_layers: that an image is split into; 0 in families that split none.
        guidance_scale: an input of a model that takes one; classifier-free guidance for others, off at 1 or
            less.
    """

    prompt: str = ""
    negative_prompt: str = ""
    conditioning: Conditioning
    negative: Conditioning
    inputs: tuple[Image, ...] = ()
    control: tuple[Image, ...] = ()
    inpaint_mask: tuple[Image, ...] = ()
    face: tuple[Image, ...] = ()
    width: int
    height: int
    num_frames: int = 1
    fps: float | None = None
    num_layers: int = 0
    num_inference_steps: int
    guidance_scale: float
    seed: int

    @property
    def is_guided(self) -> bool:
        """Whether there is classifier-free guidance, of models that take no scale."""
        return self.guidance_scale > 1

    def call_arguments(self, noise_device: torch.device | str = "cpu") -> dict[str, Any]:
        """What all pipelines of diffusers take; they draw the starting noise on ``noise_device``."""
        return {
            "width": self.width,
            "height": self.height,
            "num_inference_steps": self.num_inference_steps,
            "generator": torch.Generator(noise_device).manual_seed(self.seed),
        }

    def fitted(self, image: str, *resampling: str) -> Code:
        """The call that cuts an image to the preview's size.

        Args:
            resampling: code of the filter, where that is not the default of Pillow.
        """
        return Code(f"ImageOps.fit({', '.join((image, str((self.width, self.height)), *resampling))})")


def in_turn(requests: Sequence[PreviewRequest]) -> Iterator[PreviewRequest]:
    """Each request, one after the other, with a report of how many are done."""
    progress = ProgressLog(None, len(requests), phase="generating")
    for request in requests:
        yield request
        progress.advance()
