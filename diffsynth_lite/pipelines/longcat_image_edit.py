"""This file trains LongCat-Image-Edit, which edits one image.

The transformer is LongCat-Image's; the tokens of the image to edit come after those of the noisy image.
Sources: diffusers ``pipeline_longcat_image_edit.py``; ``train_examples/edit_lora`` of the authors.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from diffusers import LongCatImageEditPipeline
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit as edit

from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines import longcat_image
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE
from diffsynth_lite.pipelines.flux_kontext import OneInput, only_image
from diffsynth_lite.pipelines.longcat_image import LONGCAT_IMAGE
from diffsynth_lite.pipelines.qwen_image import IMAGE_TOKEN
from diffsynth_lite.pipelines.qwen_image_edit import TextAndImages, load_image_processor

# A literal in the pipeline, whose text encoder sees images at half of its width and height.
_AREA = 1024 * 1024
# Pixels of one token of the text encoder: patches of 14 x 14, merged two by two.
_TOKEN_AREA = 28 * 28

model_fn_longcat_image_edit = longcat_image.model_fn_longcat_image
"""One forward; ``input_latents_bchw`` is the image to edit."""


_EDIT = LONGCAT_IMAGE.but(
    "LongCat-Image-Edit",
    "meituan-longcat/LongCat-Image-Edit",
    pipeline_class="LongCatImageEditPipeline",
    sources={"size": "the area that the pipeline brings images to"},
    unconfirmed=(*LONGCAT_IMAGE.unconfirmed, "that its settings are those of LongCat-Image"),
)
_TURBO = _EDIT.but(
    "LongCat-Image-Edit-Turbo",
    "meituan-longcat/LongCat-Image-Edit-Turbo",
    distilled="8 steps without guidance",
)


class LongCatImageEdit(OneInput, longcat_image.LongCatImage):
    """LongCat-Image-Edit and Edit-Turbo, which edit one image.

    LongCat-Image whose tokens also hold the image to edit, brought to about a megapixel, and whose prompts
    hold what the text encoder sees of it at half that size. Prompts, guidance without ``enable_cfg_renorm``,
    the shift of the noise levels and LoRA files are as in ``longcat_image``.

    The pipeline generates a megapixel in the shape of the image to edit, and so do previews, which take no
    size: train on pairs of one shape, at 1024 x 1024 pixels.

    Turbo is distilled to 8 steps without guidance. No setting is known to show it; it is recognised by its
    name.
    """

    pipelines = (LongCatImageEditPipeline,)
    releases = (_EDIT, _TURBO)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"edit": "longcat_image_edit_lora.yaml"}
    record_kinds = ("edit",)
    prompt_id = "longcat_image_edit/prompt/1"
    latents_id = "longcat_image_edit/latents/1"
    prompt_sees_images = True
    refused_in_prompts = (IMAGE_TOKEN,)
    prompt_tokens_of_an_input = _AREA // 4 // _TOKEN_AREA
    takes_size = False
    keeps_input_size = True
    encodes_as_model = True

    @property
    def components_without_weights(self) -> tuple[str, ...]:
        return (*super().components_without_weights, "text_processor")

    @property
    def pipeline_settings(self) -> Mapping[str, Any]:
        """The pipeline takes a part of this processor, also where it sees no prompt."""
        return {"text_processor": TextAndImages(tokenizer=None, image_processor=None)}

    @cached_property
    def _image_processor(self) -> Any:
        return load_image_processor(self.folder.place("text_processor").path)

    def input_size(self, width: int, height: int, num_inputs: int = 1) -> tuple[int, int]:
        size: tuple[int, int] = edit.calculate_dimensions(_AREA, width / height)
        return size

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        """With what the text encoder sees of an image of the shape of the result, between its two marks."""
        height, width = latents_shape[-2:]
        width, height = (side // 2 for side in self.input_size(8 * width, 8 * height))
        num_patches = self._image_processor.get_number_of_image_patches(height, width)
        num_tokens = self.max_prompt_tokens + num_patches // self._image_processor.merge_size**2 + 2
        prompt_width = self.folder.component_config("transformer")["joint_attention_dim"]
        return {"prompt_embeds": torch.ones(num_tokens, prompt_width)}

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        return f"{super().prompt_encoder_id(dtype)} {self.folder.fingerprint('text_processor')}"

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        pipeline = super().prompt_pipeline(dtype, device, **settings)
        pipeline.image_processor_vl = self._image_processor
        return pipeline

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        resize, rows = pipeline.image_processor.resize, []
        for prompt in prompts:  # one by one: the pipeline encodes the first of several
            image = only_image(prompt.images, pipeline)
            width, height = self.input_size(*image.size)
            seen = resize(resize(image, height, width), height // 2, width // 2)
            embeds_bld, _ = pipeline.encode_prompt(pipeline.tokenizer.numbers(prompt.text), seen)
            rows.append({"prompt_embeds": embeds_bld[0].cpu()})
        return rows

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_inputs(conditioning, like) | self.given_latents(conditioning, like)

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"image": INPUT_IMAGE}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return {"guidance_scale": request.guidance_scale, "image": only_image(request.inputs, pipeline)}


def tiny() -> LongCatImageEditPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second."""
    return LongCatImageEditPipeline(**longcat_image.tiny().components)
