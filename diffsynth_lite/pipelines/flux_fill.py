"""This file trains FLUX.1 Fill, which regenerates a part of an image.

The transformer is FLUX.1's with more input channels: each token of the noisy image also holds the latents
of the image without that part, and the mask in pixels.
Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels of a token.
Source: diffusers ``pipeline_flux_fill.py``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import FluxFillPipeline, FluxTransformer2DModel
from PIL import ImageOps
from PIL.Image import Resampling

from diffsynth_lite.media import Media, RecordKind
from diffsynth_lite.pipelines import flux
from diffsynth_lite.pipelines.base.diffusers_family import device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.model_function import stacked
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE, LANCZOS
from diffsynth_lite.pipelines.flux import FLUX_DEV
from diffsynth_lite.releases.release import ReleaseComponent
from diffsynth_lite.testing import seeded

model_fn_flux_fill = flux.model_fn_flux
"""One forward; ``condition_bld`` are the masked image and the mask, as further channels of the tokens."""

_MASKED, _MASK = "masked_tokens", "mask_tokens"
_PIXELS_OF_A_TOKEN = 16 * 16


_FILL_SOURCE = "black-forest-labs/flux, src/flux/util.py, flux-dev-fill"

_RELEASE = FLUX_DEV.but(
    "FLUX.1 Fill dev",
    "black-forest-labs/FLUX.1-Fill-dev",
    pipeline_class="FluxFillPipeline",
    transformer=ReleaseComponent(
        "FluxTransformer2DModel",
        {"in_channels": 384, "out_channels": 64, "guidance_embeds": True},
        dtype="bfloat16",
        source=f"{_FILL_SOURCE}; diffusers, loaders/single_file_utils.py, flux-fill",
    ),
    version="flux1",
    sources={
        "pipeline": f"{_FILL_SOURCE}; all else as of FLUX.1 dev",
        "parameters": "black-forest-labs/flux, model_cards/FLUX.1-tools.md",
    },
    unconfirmed=("that its other settings are those of FLUX.1 dev", "whether it is gated"),
)


class FluxFill(flux.Flux):
    """FLUX.1 Fill dev, which paints the masked part of an image again.

    FLUX.1 dev whose tokens also hold the image with its masked part in grey, encoded, and the mask of their
    pixels: 384 channels in place of 64. Masks come from files, or are drawn (`data.random_masks`). The loss
    is that of the whole image; where `data.mask_dir` names the same masks, that of the masked part.

    Guidance and the shift of the noise levels are as in ``flux``: training gives the model 1, and previews
    ``validation.guidance_scale``, which its pipeline and the recipe have at 30. A script that was proposed
    for diffusers, and is not in it, also trains with 1, and its README generates with 5
    (``examples/flux-fill`` at commits c67d649 and 81cc2ab). The pipeline samples what the VAE gives of the
    image; training takes the mode, the same each time.
    """

    pipelines = (FluxFillPipeline,)
    releases = (_RELEASE,)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"inpaint": "flux_fill_lora.yaml"}
    record_kinds = ("inpaint",)
    latents_id = "flux_fill/latents/1"
    max_prompt_tokens = 512
    distilled = None

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        # The mask has a byte a pixel, which is as much as the latents' four a value.
        return 2 * math.prod(latents_shape)

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        num_tokens = self.num_tokens(latents_shape)
        masked_ld = torch.ones(num_tokens, math.prod(latents_shape) // num_tokens)
        mask_ld = torch.ones(num_tokens, _PIXELS_OF_A_TOKEN, dtype=torch.uint8)
        return (super().example_conditioning(latents_shape) or {}) | {_MASKED: masked_ld, _MASK: mask_ld}

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [super(FluxFill, self).encode_pixels(vae, image_bchw) for image_bchw in torch.split(pixels, 1)]
        )

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        """Further channels of the tokens: (L, 64) of the masked image, (L, 256) of the mask."""
        (mask,) = item.inpaint_mask
        pixels_bchw = pipeline.image_processor.preprocess(item.frames[0])
        mask_bchw = pipeline.mask_processor.preprocess(mask)
        masked_bchw = pipeline.vae.encode(
            (pixels_bchw * (1 - mask_bchw)).to(pipeline.vae.device, pipeline.vae.dtype)
        ).latent_dist.mode()
        # It takes latents, too, which it normalises: so the mode, in place of a draw of its own.
        mask_bld, masked_bld = pipeline.prepare_mask_latents(
            mask_bchw,
            masked_bchw.float().cpu(),
            batch_size=1,
            num_channels_latents=pipeline.latent_channels,
            num_images_per_prompt=1,
            height=mask.height,
            width=mask.width,
            dtype=torch.float32,
            device="cpu",
            generator=None,
        )
        return {
            _MASKED: masked_bld[0],
            _MASK: mask_bld[0].to(torch.uint8),
        }

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        of_tokens = [stacked(conditioning, name, like) for name in (_MASKED, _MASK)]
        return super().model_inputs(conditioning, like) | {"condition_bld": torch.cat(of_tokens, dim=-1)}

    def preview_pipeline(self, model: torch.nn.Module, vae_dtype: torch.dtype, **settings: Any) -> Any:
        pipeline = super().preview_pipeline(model, vae_dtype, **settings)
        # The pipeline encodes the image as if its VAE had the dtype of the embeddings.
        vae, dtype = pipeline.vae, device_and_dtype(model)["dtype"]
        vae.encoder.register_forward_pre_hook(lambda _module, inputs: (inputs[0].to(vae.dtype),))
        vae.encoder.register_forward_hook(lambda _module, _inputs, moments: moments.to(dtype))
        return pipeline

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        (image,), (mask,) = request.inputs, request.inpaint_mask
        # The middle, as the mask is of it; the pipeline would distort the image.
        middle = ImageOps.fit(image, (request.width, request.height), method=Resampling.LANCZOS)
        given = {"image": middle, "mask_image": mask}
        return super().call_arguments(pipeline, request) | given

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        files = {"image": INPUT_IMAGE, "mask_image": 'load_image("mask.png")'}
        return {name: request.fitted(file, LANCZOS) for name, file in files.items()}


def tiny() -> FluxFillPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second."""
    parts = {name: part for name, part in flux.tiny().components.items() if part is not None}
    layout = {name: value for name, value in parts["transformer"].config.items() if name[0] != "_"}
    layout |= {"in_channels": 2 * 64 + _PIXELS_OF_A_TOKEN, "out_channels": 64}
    with seeded(0):
        parts["transformer"] = FluxTransformer2DModel(**layout)
    return FluxFillPipeline(**parts)
