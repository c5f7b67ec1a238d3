"""This file trains Qwen-Image-Layered, which splits an image into transparent layers.

Layouts: b batch, c latent channels, f images (the whole one, then its layers), h and w latent height and
width; l tokens, d channels.
Source: diffusers ``pipeline_qwenimage_layered.py``. The transformer is Qwen-Image's with another embedding of
places, in which each layer has its own; the tokens of the image to split come after all others.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from diffusers import QwenImageLayeredPipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered as layered
from PIL.Image import Image
from transformers import Qwen2VLImageProcessorPil as ImageProcessor

from diffsynth_lite.core.noise.densities import resolution_mu
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Generated, Media, RecordKind
from diffsynth_lite.pipelines import qwen_image
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import exponential_shift
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.latents import encode_latents
from diffsynth_lite.pipelines.base.model_function import stacked
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE, Code
from diffsynth_lite.pipelines.qwen_image import QWEN_EDIT, QWEN_IMAGE_BASE, QWEN_TRANSFORMER
from diffsynth_lite.releases.components import MUSUBI, QWEN_VAE
from diffsynth_lite.testing import autoencoders, seeded

_CHANNELS = 4
_BASE_TOKENS = 256
"""Of the image at which the sampler's mu is 1: 256 x 256 pixels. A number in the pipeline's call."""
_OWN_RESOLUTIONS = (640, 1024)
"""Those that the pipeline takes: edges of squares of the area that it generates."""
_IS_RGB = 0
"""``additional_t_cond`` in the pipeline: an input of the model with the noise level."""
_IMAGE = "picture_latents"
_PROMPT_IS_ENCODED = "as embeddings"

model_fn_qwen_image_layered = qwen_image.model_fn_qwen_image
"""One forward; ``latents_bcfhw`` are the image and its layers, ``input_latents_bcfhw`` that image."""


_LAYERED = replace(
    QWEN_EDIT,
    name="Qwen-Image-Layered",
    hub_id="Qwen/Qwen-Image-Layered",
    pipeline_class="QwenImageLayeredPipeline",
    components={
        **QWEN_IMAGE_BASE.components,
        "transformer": replace(
            QWEN_TRANSFORMER,
            config={"use_additional_t_cond": True, "use_layer3d_rope": True},
            source=f"defaults of the class, with the two settings that {MUSUBI}qwen_image/"
            "qwen_image_model.py builds this model with; dtype as in Edit-2511",
        ),
        "vae": replace(
            QWEN_VAE,
            config={"input_channels": 4},
            source=f"{QWEN_VAE.source}; the channels as in {MUSUBI}qwen_image_cache_latents.py",
        ),
    },
    size=(640, 640, 5),
    architecture="Qwen-Image-Layered",
    version="qwen_image_layered",
    sources={
        **QWEN_EDIT.sources,
        "size": "the area that the pipeline brings images to, and one image with four layers, by default",
        "pipeline": "diffusers, docs/source/en/api/pipelines/qwenimage.md",
    },
)


class QwenImageLayered(qwen_image.QwenImage):
    """Qwen-Image-Layered: an image and a prompt in, its layers with transparency out.

    Qwen-Image's transformer on an autoencoder with a fourth channel. It generates the whole image again and
    then each layer, from the bottom one to the top one; all are learned, and previews show the layers. The
    image to split is a clean input. A caption describes the whole image, also what is hidden in it. Without a
    prompt the pipeline has its text encoder describe the image; training and previews take the text as it is
    written.

    The pipeline generates 640 x 640 or 1024 x 1024 pixels, in the shape of the image; training and previews
    may have any size. Its shift, 12 at the first of these and 55 at the second, is large; training has
    Qwen-Image's.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (QwenImageLayeredPipeline,)
    releases = (_LAYERED,)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"layers": "qwen_image_layered_lora.yaml"}
    latents_id = "qwen_image_layered/latents/1"
    record_kinds = ("layers",)
    default_num_layers = 4
    takes_size = False
    encodes_as_model = True

    def check_folder(self, *, with_weights: bool = True) -> None:
        super().check_folder(with_weights=with_weights)
        vae = self.folder.component_config("vae")
        if vae.get("input_channels") != _CHANNELS:
            raise UserError(
                f"model.path: {vae.file}: the autoencoder takes images of {vae.get('input_channels', 3)} "
                f"channels, and that of Qwen-Image-Layered takes {_CHANNELS}, the last one of transparency; "
                "get the folder's own autoencoder again"
            )

    def load_media_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Media]], list[EncodedMedia]]:
        pipeline = assemble(self.pipeline, vae=self.load_component("vae", dtype).to(device))

        def latents_of(image: Image) -> torch.Tensor:
            pixels_bchw = pipeline.image_processor.preprocess(image.convert("RGBA"))
            return encode_latents(pipeline.vae, pixels_bchw.unsqueeze(2))[0]

        def encode(media: Sequence[Media]) -> list[EncodedMedia]:
            # One by one, as the pipeline does: each is an image of its own to the autoencoder.
            encoded = [[latents_of(image) for image in (item.frames[0], *item.layers)] for item in media]
            return [{"latents": torch.cat(row, dim=1), _IMAGE: row[0]} for row in encoded]

        return encode

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        return math.prod(_of_one_image(latents_shape))

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        """Those of the image, of its layers, and of the image to split."""
        _, num_images, height, width = latents_shape
        return super().num_tokens((1, num_images + 1, height, width))

    def resolution_shift(self, latents_shape: Sequence[int]) -> float:
        """By the area of the image only: mu is the square root of its part of 256 x 256 pixels.

        Whether that is the shift or its logarithm depends on the folder's sampler.
        """
        mu = math.sqrt(super().num_tokens(_of_one_image(latents_shape)) / _BASE_TOKENS)
        is_linear = self.scheduler_config.get("time_shift_type") == "linear"
        return mu if is_linear else exponential_shift(mu)

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """Qwen-Image's, by the area of the image: 1.8 at 640 x 640 pixels.

        With its own, 12 at that size, one step in thirteen would be of a noise level below 0.5.
        ``qwen_shift`` of musubi-tuner, which trains this model, is Qwen-Image's, too; DiffSynth-Studio has
        2.2 at any size.
        """
        config = self.scheduler_config
        mu = resolution_mu(
            super().num_tokens(_of_one_image(latents_shape)),
            base_shift=config.get("base_shift", 0.5),
            max_shift=config.get("max_shift", 0.9),
            base_tokens=config.get("base_image_seq_len", 256),
            max_tokens=config.get("max_image_seq_len", 8192),
        )
        return exponential_shift(mu)

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        image = torch.ones(tuple(_of_one_image(latents_shape)))
        return (super().example_conditioning(latents_shape) or {}) | {_IMAGE: image}

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_inputs(conditioning, like) | {
            "input_latents_bcfhw": [stacked(conditioning, _IMAGE, like)],
            "additional_t_cond": torch.full((len(conditioning),), _IS_RGB, device=like["device"]),
        }

    def preview_pipeline(self, model: torch.nn.Module, vae_dtype: torch.dtype, **settings: Any) -> Any:
        return super().preview_pipeline(model, vae_dtype, text_encoder=_NoEncoder(vae_dtype), **settings)

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        edge = math.sqrt(request.width * request.height)
        return {
            "layers": request.num_layers,
            "resolution": min(_OWN_RESOLUTIONS, key=lambda own: abs(own - edge)),
            "image": Code(f'{INPUT_IMAGE}.convert("RGBA")'),
        }

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | {
            "image": _only_image(request.inputs),
            # Without one the pipeline would have the image described.
            "prompt": _PROMPT_IS_ENCODED,
            "layers": request.num_layers,
            "resolution": _OWN_RESOLUTIONS[0],  # of no effect: see _generated_at
        }

    def generate(self, pipeline: Any, request: PreviewRequest) -> Generated:
        with _generated_at(request.width, request.height):
            return super().generate(pipeline, request)

    def generated(self, output: Any, pipeline: Any) -> Generated:
        """The layers, with their transparency."""
        (layers,) = output.images
        frames: list[Image] = layers
        return frames


@dataclass(frozen=True)
class _NoEncoder:
    """Replaces the text encoder, which the pipeline asks for the dtype of the image."""

    dtype: torch.dtype


@contextmanager
def _generated_at(width: int, height: int) -> Iterator[None]:
    """Scope in which the pipeline generates in this size: by itself it has two areas for any shape."""
    own = layered.calculate_dimensions
    layered.calculate_dimensions = lambda _area, _ratio: (width, height)
    try:
        yield
    finally:
        layered.calculate_dimensions = own


def _only_image(images: Sequence[Image]) -> Image:
    if len(images) != 1:
        raise UserError(
            f"validation.inputs: {len(images)} images for a prompt; Qwen-Image-Layered splits one"
        )
    return images[0].convert("RGBA")


def _of_one_image(latents_shape: Sequence[int]) -> tuple[int, ...]:
    channels, _, *area = latents_shape
    return channels, 1, *area


def tiny() -> QwenImageLayeredPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Its processor, which nothing here asks for, is the part for images only: the class of the released
    model needs torchvision.
    """
    parts: Mapping[str, Any] = qwen_image.tiny().components
    with seeded(0):
        transformer = QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=3,
            joint_attention_dim=parts["text_encoder"].config.text_config.hidden_size,
            axes_dims_rope=(8, 4, 4),
            use_additional_t_cond=True,
            use_layer3d_rope=True,
        )
    return QwenImageLayeredPipeline(
        scheduler=parts["scheduler"],
        vae=autoencoders.tiny_qwen_vae(input_channels=_CHANNELS),
        text_encoder=parts["text_encoder"],
        tokenizer=parts["tokenizer"],
        processor=ImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}),
        transformer=transformer,
    )
