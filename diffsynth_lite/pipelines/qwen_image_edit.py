"""This file trains Qwen-Image-Edit, with one input image, and Edit-Plus (2509 and 2511), with several.

The transformer is Qwen-Image's; the tokens of the input images come after those of the noisy image.
Sources: diffusers ``pipeline_qwenimage_edit.py`` and ``pipeline_qwenimage_edit_plus.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as edit_plus
from PIL.Image import Image
from transformers import BatchFeature
from transformers import Qwen2VLImageProcessorPil as ImageProcessor

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt, RecordKind
from diffsynth_lite.pipelines import qwen_image
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.latents import encode_latents
from diffsynth_lite.pipelines.base.mixins import EditInputs
from diffsynth_lite.pipelines.base.model_function import INPUT, stack_inputs
from diffsynth_lite.pipelines.base.model_settings import shortened
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE
from diffsynth_lite.pipelines.qwen_image import QWEN_EDIT, QWEN_TRANSFORMER

# A literal in the pipeline; Edit-Plus has names for its areas.
_EDIT_AREA = 1024 * 1024
# Pixels of one token of the text encoder: patches of 14 x 14, merged two by two.
_TOKEN_AREA = 28 * 28

model_fn_qwen_image_edit = qwen_image.model_fn_qwen_image
"""One forward; ``input_latents_bcfhw`` are the images to edit."""


_EDIT_2509 = replace(
    QWEN_EDIT,
    name="Qwen-Image-Edit-2509",
    hub_id="Qwen/Qwen-Image-Edit-2509",
    pipeline_class="QwenImageEditPlusPipeline",
    architecture="Qwen-Image-Edit-Plus",
    sources={**QWEN_EDIT.sources, "pipeline": "diffusers, docs/source/en/api/pipelines/qwenimage.md"},
)

_EDIT_2511 = replace(
    _EDIT_2509,
    name="Qwen-Image-Edit-2511",
    hub_id="Qwen/Qwen-Image-Edit-2511",
    architecture="Qwen-Image-Edit-2511",
    components={
        **QWEN_EDIT.components,
        "transformer": replace(
            QWEN_TRANSFORMER,
            config={"zero_cond_t": True},
            source=f"{QWEN_TRANSFORMER.source}; `zero_cond_t` as in mflux, a public port",
        ),
    },
)


class QwenImageEdit(EditInputs, qwen_image.QwenImage):
    """Qwen-Image-Edit (one input image) and Edit-Plus 2509, 2511 (several); the folder decides which.

    Qwen-Image whose prompts and tokens also hold the images to edit, each brought to about a megapixel.
    The shift of the noise levels is that of Qwen-Image, by the size of the result.

    A caption with the placeholder of an image or a video (``image_pad``, ``video_pad``), which the pipelines
    refuse beyond their own, is an item that cannot be used.
    """

    pipelines = (QwenImageEditPipeline, QwenImageEditPlusPipeline)
    releases = (QWEN_EDIT, _EDIT_2509, _EDIT_2511)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"edit": "qwen_image_edit_lora.yaml"}
    record_kinds = ("edit",)
    # The pipelines cut no prompt; they refuse a limit above this one.
    max_prompt_tokens = 1024
    prompt_sees_images = True
    encodes_as_model = True
    refused_in_prompts = qwen_image.PLACEHOLDERS

    @property
    def components_without_weights(self) -> tuple[str, ...]:
        return (*super().components_without_weights, "processor")

    @property
    def max_inputs(self) -> int | None:
        """1; any number with Edit-Plus."""
        return None if self._takes_several else 1

    @property
    def prompt_tokens_of_an_input(self) -> int:
        return (edit_plus.CONDITION_IMAGE_SIZE if self._takes_several else _EDIT_AREA) // _TOKEN_AREA

    def input_size(self, width: int, height: int, num_inputs: int = 1) -> tuple[int, int]:
        # Whatever its size, an input image is brought to one area.
        size = _size(width / height, edit_plus.VAE_IMAGE_SIZE if self._takes_several else _EDIT_AREA)
        if not all(size):
            raise UserError(f"{width}x{height} pixels are too narrow for an input image of this family")
        return size

    @property
    def _takes_several(self) -> bool:
        return self.pipeline is QwenImageEditPlusPipeline

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("text_encoder", "tokenizer", "processor")
        # The template is a part of diffusers, so that another version may bring another one.
        template = assemble(self.pipeline).prompt_template_encode
        return f"qwen_image_edit/prompt/2 {self.pipeline.__name__} {parts} {dtype} {template!r}"

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        tokenizer = self.load_tokenizer()
        image_processor = load_image_processor(self.folder.place("processor").path)
        return assemble(
            self.pipeline,
            **self.load_text_encoders(dtype, device),
            tokenizer=tokenizer,
            processor=TextAndImages(tokenizer=tokenizer, image_processor=image_processor),
            **settings,
        )

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        # One by one: the pipelines give all prompts of a batch the same images.
        rows = [
            pipeline.encode_prompt(
                prompt.text, image=self._seen_by_prompt(pipeline, prompt.images), device=device
            )[0][0]
            for prompt in prompts
        ]
        return [{"prompt_embeds": row.cpu()} for row in rows]

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return f"qwen_image_edit/latents/1 {self.pipeline.__name__} {self.folder.fingerprint('vae')} {dtype}"

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        return {
            f"{INPUT}{place}": encode_latents(pipeline.vae, pixels_bcfhw)[0]
            for place, pixels_bcfhw in enumerate(self._seen_by_transformer(pipeline, item.inputs))
        }

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        images = stack_inputs(conditioning, like)
        return super().model_inputs(conditioning, like) | {"input_latents_bcfhw": images}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | {"image": self._given(request.inputs)}

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"image": INPUT_IMAGE}

    def _given(self, images: Sequence[Image]) -> Image | list[Image]:
        """The images as the pipeline wants them."""
        if not images or (len(images) > 1 and not self._takes_several):
            wanted = "one or more" if self._takes_several else "exactly one"
            raise UserError(
                f"data.input_columns, validation: an item with {len(images)} input images; "
                f"a {self.pipeline.__name__} takes {wanted}"
            )
        return list(images) if self._takes_several else images[0]

    def _seen_by_prompt(self, pipeline: Any, images: Sequence[Image]) -> Image | list[Image]:
        given = self._given(images)
        if isinstance(given, list):
            return [_resize(pipeline, image, edit_plus.CONDITION_IMAGE_SIZE) for image in given]
        return _resize(pipeline, given, _EDIT_AREA)

    def _seen_by_transformer(self, pipeline: Any, images: Sequence[Image]) -> list[torch.Tensor]:
        """Each (1, 3, 1, H, W), in [-1, 1]."""
        given = self._given(images)
        if isinstance(given, list):
            sized = [(image, self.input_size(*image.size)) for image in given]
        else:
            resized = _resize(pipeline, given, _EDIT_AREA)
            sized = [(resized, resized.size)]
        return [
            pipeline.image_processor.preprocess(image, height, width).unsqueeze(2)
            for image, (width, height) in sized
        ]


def load_image_processor(folder: Path) -> Any:
    """The part for images of a processor: it makes patches of them."""
    try:
        return ImageProcessor.from_pretrained(folder)
    except OSError as error:
        raise UserError(
            f"model.path: the settings of images in {folder} cannot be read: {shortened(error)}; get the "
            "folder's preprocessor_config.json again"
        ) from error


class TextAndImages:
    """As ``Qwen2VLProcessor`` for these pipelines, without torchvision, which that class needs."""

    def __init__(self, *, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor

    def __call__(
        self, *, text: Sequence[str], images: Image | list[Image], return_tensors: str, **settings: Any
    ) -> BatchFeature:
        """Token ids and patches; each image has as many tokens in the text as it takes."""
        patches = self.image_processor(images=images, return_tensors=return_tensors)
        num_tokens = iter((patches["image_grid_thw"].prod(1) // self.image_processor.merge_size**2).tolist())
        widened = []
        for line in text:
            first, *rest = line.split(qwen_image.IMAGE_TOKEN)
            widened.append(
                first + "".join(qwen_image.IMAGE_TOKEN * next(num_tokens) + piece for piece in rest)
            )
        tokens = self.tokenizer(widened, return_tensors=return_tensors, **settings)
        return BatchFeature({**tokens, **patches})


def tiny() -> QwenImageEditPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Its processor is the part for images only: the class of the released models needs torchvision.
    """
    parts = qwen_image.tiny().components
    image_processor = ImageProcessor(size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28})
    return QwenImageEditPipeline(processor=image_processor, **parts)


def _size(aspect_ratio: float, area: int) -> tuple[int, int]:
    """Width and height that the pipelines bring an input image to."""
    width, height = edit.calculate_dimensions(area, aspect_ratio)[:2]
    return width, height


def _resize(pipeline: Any, image: Image, area: int) -> Image:
    width, height = _size(image.width / image.height, area)
    resized: Image = pipeline.image_processor.resize(image, height, width)
    return resized
