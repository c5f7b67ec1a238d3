"""This file trains edits with Krea 2: clean tokens of the input images after those of the noisy image.

Sources: ai-toolkit, commit 27a03a91f23e, ``extensions_built_in/diffusion_models/krea2``, with
``model_kwargs.edit``; ComfyUI-Krea2-Ostris-Edit, as AjCozie123/Krea2-AIO holds it (commit a58a5dfa1083,
``vendored/ostris_edit.py``); ComfyUI after its pull request 14843, as yoooshow/ComfyUI-MultiTenant has it
(commit e4cb8309b48d, ``comfy/ldm/krea2/model.py``).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import Krea2Pipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch.nn.functional import interpolate
from transformers import Qwen2VLImageProcessorPil as ImageProcessor

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt, RecordKind
from diffsynth_lite.pipelines import krea2
from diffsynth_lite.pipelines.base.diffusers_family import device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest
from diffsynth_lite.pipelines.base.latents import encode_latents
from diffsynth_lite.pipelines.base.mixins import EditInputs
from diffsynth_lite.pipelines.base.model_function import INPUT, stack_inputs, without_padding
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE
from diffsynth_lite.pipelines.qwen_image import IMAGE_TOKEN, PLACEHOLDERS
from diffsynth_lite.pipelines.qwen_image_edit import TextAndImages

_LARGEST_REFERENCE = 1024 * 1024
_LARGEST_SEEN = 384 * 384
_SMALLEST_SEEN_SIDE = 28
_LARGEST_RATIO = 200  # of the sides of what Qwen3-VL is shown; a literal in transformers
_TOKEN_SIDE = 32  # pixels of one token of the text encoder: patches of 16 x 16, merged two by two
_GRID = 16  # pixels of one token of the transformer

model_fn_krea2_edit = krea2.model_fn_krea2
"""One forward; ``input_latents_bcfhw`` are the images to edit."""


class Krea2Edit(EditInputs, krea2.Krea2):
    """Krea 2 Raw, from images and text; its LoRA is used on Turbo.

    Krea 2 makes images from text only. A LoRA teaches it to look at images, too, in the way of ai-toolkit
    (``edit: true``, read at commit 27a03a91f23e). The text encoder sees each, at most 384 x 384 pixels, as
    "Picture 1:" and so on, before the prompt. After the tokens of the noisy image the transformer sees those
    of each image, as clean latents at noise level 0, of at most a megapixel, in multiples of 16 pixels.
    References are never enlarged.

    In ComfyUI the LoRA is used with the nodes of ComfyUI-Krea2-Ostris-Edit (read in Krea2-AIO, commit
    a58a5dfa1083), or since ComfyUI's pull request 14843 with its own reference method
    ``index_timestep_zero`` (read in ComfyUI-MultiTenant, commit e4cb8309b48d); in Python with
    ``Krea2EditPipeline`` of this package, which generates the previews, as diffusers' Krea 2 pipeline takes
    no images. Two other kinds of LoRAs exist: those of ``kv_cache``, a setting of ai-toolkit (on in its
    screen) and of the nodes, where references see only each other; and Krea 2 Identity Edit
    (comfyui-krea2edit), where they come before the noisy image and have its noise level. These are not
    trained here.

    Trainer and nodes resize differently. Here references are resized by area, as by the nodes (ai-toolkit:
    bilinear, and with ``match_target_res`` to the area of the result), and what the text encoder sees by a
    bicubic filter and to an area of at least 256 x 256, as by ai-toolkit. Latents are the mode of the
    autoencoder's distribution, from which ai-toolkit draws. Prompts with images are not cut.

    Any number of images may be given; the nodes take three. Each takes up to 150 tokens of the prompt, 61 KB
    each in the cache. Noise levels are those of ``krea2``; ai-toolkit trains edits without a shift.
    """

    releases = krea2.KREA2
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"edit": "krea2_edit_lora.yaml"}
    record_kinds = ("edit",)
    latents_id = "krea2_edit/latents/1"
    prompt_sees_images = True
    prompt_tokens_of_an_input = _LARGEST_SEEN // _TOKEN_SIDE**2
    refused_in_prompts = PLACEHOLDERS

    @property
    def pipeline(self) -> Any:
        return Krea2EditPipeline

    def pipeline_for(self, request: PreviewRequest) -> Any:
        return Krea2Pipeline

    def input_size(self, width: int, height: int, num_inputs: int = 1) -> tuple[int, int]:
        shown = _fitted(width, height, _LARGEST_SEEN, smallest=_SMALLEST_SEEN_SIDE)
        if max(shown) > _LARGEST_RATIO * min(shown):
            raise UserError(f"{width}x{height} pixels are too narrow for an input image of this family")
        return _fitted(width, height, _LARGEST_REFERENCE, grid=_GRID)

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        return f"krea2_edit/prompt/1 {super().prompt_encoder_id(dtype)}"

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        return [
            {"prompt_embeds": pipeline.read(prompt.text, prompt.images, device).cpu()} for prompt in prompts
        ]

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        return {f"{INPUT}{place}": _reference(pipeline.vae, image) for place, image in enumerate(item.inputs)}

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        images = stack_inputs(conditioning, like)
        return super().model_inputs(conditioning, like) | {"input_latents_bcfhw": images}

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | {"image": request.inputs}

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"image": INPUT_IMAGE} if request.inputs else {}

    def usage_setup(self, request: PreviewRequest) -> list[str]:
        return [
            "# The pipeline of diffusers takes no image; this one does.",
            f"from {__name__} import Krea2EditPipeline",
            "pipeline = Krea2EditPipeline.of(pipeline)",
        ]


class Krea2EditPipeline(Krea2Pipeline):  # type: ignore[misc]  # diffusers' class has no types
    """diffusers' Krea 2 pipeline, which also takes images to start from."""

    @classmethod
    def of(cls, pipeline: Krea2Pipeline) -> "Krea2EditPipeline":
        """One of the same components and settings."""
        settings = {name: pipeline.config[name] for name in ("is_distilled", "patch_size")}
        layers = pipeline.text_encoder_select_layers
        return cls(**pipeline.components, text_encoder_select_layers=layers, **settings)

    @torch.no_grad()
    def read(self, prompt: str, images: Sequence[Image.Image], device: torch.device) -> torch.Tensor:
        """What layers of the text encoder give of images and a prompt, (L, K, D): L tokens, K layers."""
        if not images:
            rows_blkd, mask = self.get_text_hidden_states(prompt, device=device)
            return without_padding(rows_blkd, mask)[0]
        shown = [_shown(image) for image in images]
        placeholder = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
        pictures = "".join(f"Picture {place}: {placeholder}" for place in range(1, len(images) + 1))
        start, end = self.prompt_template_encode_prefix, self.prompt_template_encode_suffix
        processor = TextAndImages(tokenizer=self.tokenizer, image_processor=_image_processor())
        text = f"{start}{pictures}{prompt}{end}"
        given = processor(text=[text], images=shown, padding=False, return_tensors="pt").to(device)
        is_image = given["input_ids"] == self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        output = self.text_encoder(**given, mm_token_type_ids=is_image.int(), output_hidden_states=True)
        states = [output.hidden_states[layer][0] for layer in self.text_encoder_select_layers]
        return torch.stack(states, dim=1)[self.prompt_template_encode_start_idx :]

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | None = None,
        image: Image.Image | Sequence[Image.Image] = (),
        negative_prompt: str | None = None,
        guidance_scale: float = 4.5,
        **given: Any,
    ) -> Any:
        """That of diffusers, for one prompt.

        Args:
            prompt: None where ``prompt_embeds`` are given, and with guidance the negative ones.
            image: RGB, each of any size.
            given: other arguments of the call in diffusers.
        """
        images = [image] if isinstance(image, Image.Image) else list(image)
        like, device = device_and_dtype(self.transformer), self._execution_device
        if prompt is not None:
            texts = {"": prompt} | ({"negative_": negative_prompt or ""} if guidance_scale > 0 else {})
            read = {name: {"prompt_embeds": self.read(text, images, device)} for name, text in texts.items()}
            given |= krea2.padded_prompts(read, like)
        references = [_reference(self.vae, one)[None].to(**like) for one in images]
        with krea2.clean_references(self.transformer, references):
            return super().__call__(guidance_scale=guidance_scale, **given)


def _fitted(
    width: int, height: int, largest_area: int, *, grid: int = 1, smallest: int = 1
) -> tuple[int, int]:
    """Width and height within an area, about in their ratio and never larger; multiples of ``grid``."""
    scale = min(1.0, math.sqrt(largest_area / (width * height)))
    fitted = [max(round(side * scale / grid) * grid, grid, smallest) for side in (width, height)]
    return fitted[0], fitted[1]


def _shown(image: Image.Image) -> Image.Image:
    """An image as the text encoder sees it, before its own processor."""
    size = _fitted(*image.size, _LARGEST_SEEN, smallest=_SMALLEST_SEEN_SIDE)
    return image.resize(size, Image.Resampling.BICUBIC)


def _reference(vae: Any, image: Image.Image) -> torch.Tensor:
    """Normalised latents, (16, 1, H, W), in fp32, on the CPU."""
    width, height = _fitted(*image.size, _LARGEST_REFERENCE, grid=_GRID)
    pixels_bchw = VaeImageProcessor(do_resize=False).preprocess(image)
    return encode_latents(vae, interpolate(pixels_bchw, (height, width), mode="area"))[0]


def _image_processor() -> ImageProcessor:
    """That of Qwen3-VL, with the settings of its release: folders of Krea 2 have none."""
    half = [0.5] * 3
    return ImageProcessor(
        patch_size=16,
        image_mean=half,
        image_std=half,
        size={"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    )


tiny = krea2.tiny
