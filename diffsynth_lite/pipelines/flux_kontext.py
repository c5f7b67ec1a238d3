"""This file trains FLUX.1 Kontext, which edits an image.

The transformer is FLUX.1's; the tokens of the image to edit come after those of the noisy image.
Source: diffusers ``pipeline_flux_kontext.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers import FluxKontextPipeline
from diffusers.pipelines.flux import pipeline_flux_kontext as kontext
from PIL.Image import Image

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, RecordKind
from diffsynth_lite.pipelines import flux
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.latents import encode_latents
from diffsynth_lite.pipelines.base.mixins import EditInputs
from diffsynth_lite.pipelines.base.model_function import INPUT, stack_inputs
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE
from diffsynth_lite.pipelines.flux import FLUX_DEV
from diffsynth_lite.releases.components import MUSUBI, PINNED_INDEXES

model_fn_flux_kontext = flux.model_fn_flux
"""One forward; ``input_latents_bchw`` is the image to edit."""


_RELEASE = replace(
    FLUX_DEV,
    name="FLUX.1 Kontext dev",
    hub_id="black-forest-labs/FLUX.1-Kontext-dev",
    pipeline_class="FluxKontextPipeline",
    version="flux_kontext",
    sources={
        **FLUX_DEV.sources,
        "pipeline": f"{PINNED_INDEXES}; settings as of FLUX.1 dev",
        "parameters": "black-forest-labs/flux, model_cards/FLUX.1-kontext-dev.md",
        "architecture": f"{MUSUBI}utils/sai_model_spec.py, which gives it that of FLUX.1 dev, and "
        "dataset/architectures.py",
    },
    unconfirmed=("that its settings are those of FLUX.1 dev", "whether it is gated"),
)


class OneInput(EditInputs):
    """A further base class of families whose transformer takes the clean latents of one image to edit."""

    @property
    def max_inputs(self) -> int | None:
        """1."""
        return 1

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        return {f"{INPUT}0": self.encoded(pipeline, item.inputs)[0]}

    def encoded(self, pipeline: Any, images: Sequence[Image]) -> torch.Tensor:
        """Latents of the one image, (1, C, H, W), at its ``input_size``."""
        image, processor = only_image(images, pipeline), pipeline.image_processor
        width, height = self.input_size(*image.size)
        pixels_bchw = processor.preprocess(processor.resize(image, height, width), height, width)
        return encode_latents(pipeline.vae, pixels_bchw)

    def given_latents(
        self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Those of a batch, as an argument of the model function."""
        (input_latents_bchw,) = stack_inputs(conditioning, like)
        return {"input_latents_bchw": input_latents_bchw}


def only_image(images: Sequence[Image], pipeline: Any) -> Image:
    """The one image that an edit starts from."""
    if len(images) != 1:
        raise UserError(
            f"data.input_columns, validation: an item with {len(images)} input images; "
            f"a {type(pipeline).__name__} takes exactly one"
        )
    return images[0]


class FluxKontext(OneInput, flux.Flux):
    """FLUX.1 Kontext dev, which edits one image.

    FLUX.1 dev whose tokens also hold the image to edit, at the nearest of the shapes of about a megapixel
    that it was trained on. Guidance and the shift of the noise levels are as in ``flux``.
    """

    pipelines = (FluxKontextPipeline,)
    releases = (_RELEASE,)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"edit": "flux_kontext_lora.yaml"}
    record_kinds = ("edit",)
    latents_id = "flux/latents/1 FluxKontextPipeline"
    max_prompt_tokens = 512
    distilled = None
    # As in diffusers' training script for Kontext.
    default_target_modules = (*flux.Flux.default_target_modules, "proj_mlp")

    def input_size(self, width: int, height: int, num_inputs: int = 1) -> tuple[int, int]:
        rounded_width, rounded_height = (side // self.size_divisor for side in (width, height))
        if not rounded_width or not rounded_height:
            raise UserError(f"{width}x{height} pixels are too narrow for an input image of this family")
        # The nearest shape among those that the model was trained on, all of about a megapixel.
        _, width, height = min(
            (abs(rounded_width / rounded_height - w / h), w, h)
            for w, h in kontext.PREFERRED_KONTEXT_RESOLUTIONS
        )
        return width, height

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_inputs(conditioning, like) | self.given_latents(conditioning, like)

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"max_area": request.width * request.height, "image": INPUT_IMAGE}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | {
            # Encoded here: the pipeline would do it in the dtype of the embeddings.
            "image": self.encoded(pipeline, request.inputs),
            # Without an area of its own the pipeline brings each size to a megapixel.
            "max_area": request.width * request.height,
        }


def tiny() -> FluxKontextPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second."""
    return FluxKontextPipeline(**flux.tiny().components)
