"""What goes into a family and comes out of it: conditioning, encoded media, adapter files, previews."""

from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image

Conditioning = dict[str, torch.Tensor]
"""What one sample is conditioned on (prompt embeddings and the like), without a batch axis, on the CPU."""

EncodedMedia = dict[str, torch.Tensor]
"""What training needs of one item's media, on the CPU, without a batch axis: ``latents``, normalised, fp32,
``loss_mask`` where not all of them are learned, (1, ...) at their size, and whatever else the transformer is
conditioned on, which joins the conditioning of its prompt."""

LoraFile = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""An adapter as its file holds it: tensors by peft's names, without the component's prefix, and settings."""


@dataclass(frozen=True, kw_only=True)
class PreviewRequest:
    """One preview: a picture or a clip.

    Attributes:
        conditioning: of the prompt.
        negative: of the negative prompt, for classifier-free guidance.
        inputs: RGB pictures to edit, or the one to start a clip from and, where there is one, the one to lead
            it to; most families have none.
        width: pixels, a multiple of the family's ``size_divisor``.
        height: pixels, likewise.
        num_frames: of a clip, as ``check_frames`` wants it; 1 is a picture.
        num_inference_steps: denoising steps.
        guidance_scale: told to a model that knows one; classifier-free guidance for others, off at 1 or less.
        seed: of the starting noise.
    """

    conditioning: Conditioning
    negative: Conditioning
    inputs: tuple[Image, ...] = ()
    width: int
    height: int
    num_frames: int = 1
    num_inference_steps: int
    guidance_scale: float
    seed: int

    def call_arguments(self, noise_device: torch.device | str = "cpu") -> dict[str, Any]:
        """What the calls of all pipelines of diffusers take: size, steps, and the starting noise's generator.

        Args:
            noise_device: where the pipeline draws noise, which differs between devices.
        """
        return {
            "width": self.width,
            "height": self.height,
            "num_inference_steps": self.num_inference_steps,
            "generator": torch.Generator(noise_device).manual_seed(self.seed),
        }
