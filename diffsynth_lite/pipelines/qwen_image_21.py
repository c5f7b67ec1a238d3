"""This file trains Qwen-Image 2.1: images from text only, and from images to start from.

Layouts: b batch, c latent channels, f frames (1), h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_qwenimage21.py`` and ``pipeline_qwenimage21.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21 as pipeline_21
from PIL.Image import Image
from torch.nn.functional import pad
from transformers import BatchFeature, Qwen3VLForConditionalGeneration

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, Original, under
from diffsynth_lite.lora.shared_names import DOUBLE, EMBEDDER, QKV
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import Media, Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.latents import encode_latents
from diffsynth_lite.pipelines.base.mixins import EditInputs
from diffsynth_lite.pipelines.base.model_function import (
    INPUT,
    Checkpointing,
    checkpointed,
    model_function,
    stack_inputs,
)
from diffsynth_lite.pipelines.base.preview_request import INPUT_IMAGE
from diffsynth_lite.pipelines.qwen_image import IMAGE_TOKEN, PLACEHOLDERS, QWEN_IMAGE_BASE
from diffsynth_lite.pipelines.qwen_image_edit import TextAndImages, load_image_processor
from diffsynth_lite.releases.components import QWEN3_VL_8B
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_SLOT = 4  # places of the latents to one of the mask; a literal in the pipeline
_SLOT_AREA = _SLOT * 16**2  # pixels
_INPUT_SIDE: int = signature(QwenImage21Pipeline.__call__).parameters["output_resolution"].default
_MAX_INPUTS = 10  # by its README.md
_LONGEST_RATIO = 200  # of an image's sides; a literal in the processor


@model_function
def model_fn_qwen_image_21(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    *,
    input_latents_bcfhw: Sequence[torch.Tensor] = (),
    input_places: Sequence[int] = (),
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Qwen-Image 2.1, each transformer block run by the gradient engine.

    Args:
        transformer: a ``QwenImage21Transformer2DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 64, 1, H, W), noisy normalised latents, H and W even.
        timestep: (B,), noise level in [0, 1]; prompts and images to start from are at 0.
        prompt_embeds_bld: (B, L, D) embeddings of the text of prompts, padded on the right. The position of
            the image depends on L, padding included.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.
        input_latents_bcfhw: each (B, 64, 1, H_i, W_i), clean normalised latents of the images to start from,
            H_i and W_i even.
        input_places: how many tokens of the text are before each of these, in ascending order.

    Returns:
        (B, 64, 1, H, W), the predicted velocity ``noise - latents``.
    """
    images = (*input_latents_bcfhw, latents_bcfhw)
    tokens_bld = [
        QwenImage21Pipeline._pack_latents(image, *image.shape[:2], *image.shape[-2:]) for image in images
    ]
    *num_slots, num_own = (tokens.shape[1] // _SLOT for tokens in tokens_bld)
    with_slots = partial(_with_slots, places=input_places, num_slots=num_slots)
    # The model reads the mask's numbers back, and meta has none: there they stay on the CPU.
    device = torch.device("cpu") if latents_bcfhw.is_meta else latents_bcfhw.device
    is_image = ~with_slots(torch.ones(prompt_embeds_bld.shape[:2], dtype=torch.bool, device=device))
    with checkpointed(QwenImage21, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            # A copy of one image lies otherwise in memory, which shows in the last bit of a sum.
            hidden_states=torch.cat(tokens_bld, dim=1) if input_latents_bcfhw else tokens_bld[0],
            encoder_hidden_states=with_slots(prompt_embeds_bld),
            timestep=timestep,
            img_shapes=[[(1, *image.shape[-2:]) for image in images]] * len(latents_bcfhw),
            img_mask=pad(is_image, (0, num_own), value=True),
            encoder_hidden_states_mask=(
                None if prompt_embeds_mask is None else with_slots(prompt_embeds_mask.bool())
            ),
            return_dict=False,
        )[0]
    velocity_bcfhw: torch.Tensor = QwenImage21Pipeline._unpack_latents(
        velocity_bld[:, -num_own * _SLOT :], *latents_bcfhw.shape[-2:], vae_scale_factor=1
    )
    return velocity_bcfhw


def _with_slots(rows: torch.Tensor, places: Sequence[int], num_slots: Sequence[int]) -> torch.Tensor:
    """Rows of a text, (B, L, ...), with zeros where images are, whose latents take their place in the model.

    Args:
        places: how many rows are before each image.
        num_slots: that each of them has.
    """
    if not places:
        return rows
    first, *others = rows.tensor_split(list(places), dim=1)
    pieces = [first]
    for piece, number in zip(others, num_slots, strict=True):
        pieces += [rows.new_zeros(len(rows), number, *rows.shape[2:]), piece]
    return torch.cat(pieces, dim=1)


_README = "QwenLM/Qwen-Image-2.1, README.md"
_NOTES = "libwaifu, a public runtime, notes on Qwen-Image 2.1 from the published files"
_FIZGIG = "Fizgig, a public trainer, src/fizgig/families/qwen_image.py"
_TEXT_ENCODER = replace(
    QWEN3_VL_8B,
    class_name="Qwen3VLForConditionalGeneration",
    source=f"{_NOTES}; settings as in {QWEN3_VL_8B.source}; dtype from the 17.5 GB of its files",
)
_IMAGES = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "size": {"longest_edge": 4096 * 4096, "shortest_edge": 256 * 256},
    "temporal_patch_size": 2,
}
_RELEASE = Release(
    name="Qwen-Image 2.1",
    hub_id="Qwen/Qwen-Image-2.1",
    pipeline_class="QwenImage21Pipeline",
    components={
        "transformer": ReleaseComponent(
            "QwenImage21Transformer2DModel",
            dtype="bfloat16",
            source=f"{_NOTES}: the defaults of the class, in two shards in bfloat16",
        ),
        "text_encoder": _TEXT_ENCODER,
        "vae": ReleaseComponent(
            "AutoencoderKLQwenImage21",
            dtype="float32",
            source=f"{_NOTES}: the defaults of the class; dtype from the 1.35 GB in {_FIZGIG}",
        ),
    },
    scheduler=replace(QWEN_IMAGE_BASE.scheduler, source=_NOTES),
    tokenizers={"processor": ReleaseTokenizer("Qwen3VLProcessor", ("tokenizer.json",), images=_IMAGES)},
    size=(2048, 2048, 1),
    parameters=7e9,
    licence="Qwen Research License",
    gated=False,
    architecture="Qwen-Image-2.1",
    version="qwenimage21",
    sources={
        "pipeline": "docstring of the pipeline in diffusers",
        "size": _README,
        "parameters": _README,
        "licence": _NOTES,
        "architecture": f"{_FIZGIG}: `modelspec_arch` and `arch_id`",
    },
    unconfirmed=("that its processor has the settings for images of Qwen3-VL-8B-Instruct",),
)


_LORA_LAYERS = LayerNames(
    layers=(
        *under(f"{DOUBLE}.attn", (*QKV, "to_out.0")),
        *under(f"{DOUBLE}.img_mlp", ("gate_layer", "proj", "out")),
        *under("time_text_embed.timestep_embedder", EMBEDDER),
        *("img_in", "txt_in.in_layer", "txt_in.out_layer", "modulation.1", "norm_out.linear", "proj_out"),
    ),
    others={  # in ComfyUI's model
        f"{DOUBLE}.img_mlp.gate_up": Original(
            under(f"{DOUBLE}.img_mlp", ("gate_layer", "proj")), rows=(1, 1), growth=6
        )
    },
)


class QwenImage21(EditInputs, DiffusersFamily):
    """Qwen-Image 2.1, from text and from images to start from.

    32 single-stream blocks, Qwen3-VL prompts, an autoencoder of its own: 64 channels at 1/16 size, and a
    channel for transparency, which is full in training. It takes up to ten images to start from, or none; a
    data set may hold both kinds of items. The text encoder sees them, too. Each is brought to about a
    megapixel, whatever the size of the result, as by its pipeline; DiffSynth-Studio brings them to the area
    of the result. In the model they are before the result, at noise level 0 as the text is.

    Attention is causal for text; an image also sees all of itself. In a batch of prompts of several lengths
    diffusers places the images after the longest, where a model with one prompt has them elsewhere; so
    samples of one length go through the model together and the others after them, and a sample counts as much
    in a batch as by itself. Processes that share its weights (``memory.shard_base``) therefore take one
    sample at a time. Its pipeline cuts no prompt; here those of more than 1024 tokens lose their end. A
    caption with the placeholder of an image or a video (``image_pad``, ``video_pad``), which the pipeline
    refuses, is an item that cannot be used.

    It is meant to be used without guidance. The sampler's shift grows with the image: 1.7 at 512 x 512
    pixels, 2.0 at 1024 x 1024 and 3.7 at 2048 x 2048, which it is made for. DiffSynth-Studio trains with 2.2
    at any size. Fizgig, a trainer, reports that LoRAs trained on it break after some hundred steps unless an
    adapter is active during training that is removed afterwards, and offers one. SimpleTuner trains with one
    by default, ``SimpleTuner/Qwen-Image-2.1-training-assistant-v3``: the file for ``model.training_adapter``.
    It was trained on images from text only; what it does for edits is not known.

    No layer of the last block is unused: text and image share its weights.
    """

    pipelines = (QwenImage21Pipeline,)
    releases = (_RELEASE,)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {
        "image": "qwen_image_21_lora.yaml",
        "edit": "qwen_image_21_edit_lora.yaml",
    }
    transformer_class = QwenImage21Transformer2DModel
    lora_spelling = taken_by_comfyui(by_kohya_names=False)
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen3VLForConditionalGeneration,
        "vae": AutoencoderKLQwenImage21,
    }
    tokenizers = ("processor",)
    record_kinds = ("image", "edit")
    prompt_sees_images = True
    encodes_as_model = True
    block_lists = ("transformer_blocks",)
    dispatches_attention = False  # its processor for training names no backend
    unused_matmuls = ("attn.to_out.0", "img_mlp.out")
    size_divisor = 32
    max_prompt_tokens = 1024
    model_fn = model_fn_qwen_image_21
    prompt_id = "qwen_image_21/prompt/1"
    latents_id = "qwen_image_21/latents/1"
    scale_argument = "true_cfg_scale"
    prompt_width = "context_in_dim"
    refused_in_prompts = PLACEHOLDERS
    splits_batches = True
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*_ATTENTION, "img_mlp.gate_layer", "img_mlp.proj", "img_mlp.out"),
    }
    default_target_modules = target_sets["all"]

    @property
    def pipeline(self) -> Any:
        return _Pipeline

    def pipeline_for(self, request: PreviewRequest) -> Any:
        return QwenImage21Pipeline

    @property
    def pipeline_settings(self) -> Mapping[str, Any]:
        """The noise levels that a distilled release is drawn at, as the pipeline takes them; others: None."""
        return {"sample_sigmas": self.folder.pipeline_config().get("sample_sigmas")}

    @property
    def distilled(self) -> str | None:
        """Those with ``sample_sigmas`` in ``model_index.json``. Better train the model they are made from."""
        if not any(self.pipeline_settings.values()):
            return None
        return "sample_sigmas in its model_index.json; better train the model that it was made from"

    @property
    def max_inputs(self) -> int | None:
        """10."""
        return _MAX_INPUTS

    def input_size(self, width: int, height: int, num_inputs: int = 1) -> tuple[int, int]:
        fitted_width, fitted_height, _ = pipeline_21.calculate_dimensions(_INPUT_SIDE**2, width / height)
        short, long = sorted((fitted_width, fitted_height))
        if long > _LONGEST_RATIO * short:
            raise UserError(f"{width}x{height} pixels are too narrow for an input image of this family")
        return fitted_width, fitted_height

    @property
    def prompt_template(self) -> Any:
        pipeline = _Pipeline()
        return pipeline.prompt_template_t2i, pipeline.prompt_template_ti2i

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        return _Pipeline(processor=self._processor, **self.load_text_encoders(dtype, device), **settings)

    @property
    def _processor(self) -> "_Processor":
        folder = self.folder.place("processor").path
        return _Processor(self.load_tokenizer("processor"), folder, self.max_prompt_tokens)

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        # One by one: the pipeline pads a batch on the left, and rounding would depend on other prompts.
        return [self._encoded(pipeline, prompt, device) for prompt in prompts]

    def _encoded(self, pipeline: Any, prompt: Prompt, device: torch.device) -> Conditioning:
        images = [self._fitted(pipeline, image) for image in prompt.images]
        embeds_bld, _, is_image = pipeline.encode_prompt(prompt.text, image=images or None, device=device)
        num_slots = sum(one.width * one.height for one in images) // _SLOT_AREA
        if is_image.sum() != num_slots:
            raise UserError(
                f"model.path: by the settings of images in {self.folder.place('processor').path} a prompt "
                f"has {is_image.sum()} tokens for its images, and the model {num_slots}; get the folder again"
            )
        # The model puts latents in the place of what the text encoder gives of an image.
        encoded = {"prompt_embeds": embeds_bld[0][~is_image[0]].cpu()}
        if images:  # between two of them there is text
            num_before = (~is_image[0]).cumsum(0)[is_image[0]]
            encoded["input_places"] = num_before.unique().cpu()
        return encoded

    def _fitted(self, pipeline: Any, image: Image) -> Image:
        """An image to start from as the text encoder and the autoencoder see it."""
        width, height = self.input_size(*image.size)
        fitted: Image = pipeline.image_processor.resize(image.convert("RGBA"), height, width)
        return fitted

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the end of the chat around each text, which counts too; the instruction before it does not."""
        processor = self._processor
        pipeline = _Pipeline(processor=processor)
        chats = [pipeline.prompt_template_t2i.format(text or " ") for text in texts]
        return [len(tokens) - pipeline._drop_idx for tokens in processor.tokenizer(chats)["input_ids"]]

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        return super().encode_pixels(vae, pad(pixels, (0, 0, 0, 0, 0, 1), value=1.0))  # opaque

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        encoded = {}
        for place, image in enumerate(item.inputs):
            pixels_bchw = pipeline.image_processor.preprocess(self._fitted(pipeline, image))
            encoded[f"{INPUT}{place}"] = encode_latents(pipeline.vae, pixels_bchw)[0]
        return encoded

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        images = stack_inputs(conditioning, like)
        return super().model_inputs(conditioning, like) | {
            "input_latents_bcfhw": images,
            # They depend on the number of images only.
            "input_places": _places_of(conditioning[0], len(images)).tolist(),
        }

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        return super().prompt_argument({"prompt_embeds": prompt["prompt_embeds"]}, like)

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        given = super().call_arguments(pipeline, request)
        if not request.inputs:
            return given
        places = _places_of(request.conditioning, len(request.inputs))
        masks = dict.fromkeys(("prompt_embeds_mask", "negative_prompt_embeds_mask"), places)
        return given | masks | {"image": list(request.inputs)}

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"image": INPUT_IMAGE} if request.inputs else {}


def _places_of(prompt: Conditioning, num_inputs: int) -> torch.Tensor:
    """Where in a prompt its images are; all are before the text in the example of a plan."""
    return prompt.get("input_places", torch.zeros(num_inputs, dtype=torch.long))


class _Processor(TextAndImages):
    """What ``Qwen3VLProcessor`` does of a text and of images, without torchvision, which that class needs.

    Args:
        folder: of its settings for images, which are read when there are some.
        max_tokens: of the text.
    """

    def __init__(self, tokenizer: Any, folder: Path, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._folder = folder
        self._num_before = 0

    @cached_property
    def image_processor(self) -> Any:
        return load_image_processor(self._folder)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, return_dict: bool
    ) -> list[list[int]]:
        """Tokens of what is before each prompt, which the pipeline needs to remove them."""
        chats: list[list[int]] = self.tokenizer.apply_chat_template(
            [list(conversation)], tokenize=tokenize, return_dict=return_dict
        )
        self._num_before = len(chats[0])
        return chats

    def __call__(self, *, text: Sequence[str], images: Any = None, **settings: Any) -> BatchFeature:
        """Token ids of one text, cut after as many tokens as there may be, and patches of its images."""
        read = self.tokenizer if images is None else partial(super().__call__, images=images)
        encoded = BatchFeature(dict(read(text=text, **settings)))
        is_image = encoded["input_ids"] == self.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        encoded["mm_token_type_ids"] = is_image.long()
        longest = self._num_before + self.max_tokens + int(is_image.sum())
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            encoded[name] = encoded[name][:, :longest]
        return encoded


class _NoTexts:
    """Replaces the processor where no prompt is read: a new pipeline asks it for tokens."""

    @property
    def tokenizer(self) -> "_NoTexts":
        return self

    def apply_chat_template(self, *_: Any, **__: Any) -> list[list[int]]:
        return [[]]

    def encode(self, _: str) -> list[int]:
        return [-1]


class _Pipeline(QwenImage21Pipeline):  # type: ignore[misc]  # diffusers' class has no types
    """The pipeline, which can also be made of a few of its parts."""

    def __init__(
        self,
        scheduler: Any = None,
        vae: Any = None,
        text_encoder: Any = None,
        processor: Any = None,
        transformer: Any = None,
        sample_sigmas: Sequence[float] | None = None,
    ) -> None:
        super().__init__(scheduler, vae, text_encoder, processor or _NoTexts(), transformer, sample_sigmas)

    def encode_prompt(
        self,
        prompt: Any,
        image: Sequence[Image] | None = None,
        *,
        prompt_embeds: torch.Tensor | None = None,
        prompt_embeds_mask: torch.Tensor | None = None,
        **settings: Any,
    ) -> Any:
        """As by the pipeline, which takes an encoded prompt without images only.

        Args:
            prompt_embeds_mask: places of the images: the pipeline's call has no argument for these, and
                a single prompt has no padding.
        """
        if prompt_embeds is None or prompt_embeds_mask is None:
            return super().encode_prompt(prompt, image, prompt_embeds=prompt_embeds, **settings)
        num_slots = [one.width * one.height // _SLOT_AREA for one in image or ()]
        given = {"places": prompt_embeds_mask.tolist(), "num_slots": num_slots}
        is_text = prompt_embeds.new_ones(prompt_embeds.shape[:2], dtype=torch.bool)
        return _with_slots(prompt_embeds, **given), None, ~_with_slots(is_text, **given)


def tiny() -> QwenImage21Pipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels; 64 latent channels at 1/16 size with the real model's statistics. Its processor
    does the same as that of the released model, whose class needs torchvision.
    """
    tokenizer = tokenizers.qwen2_tokenizer()
    text_encoder = text_encoders.tiny_qwen3_vl_lm(tokenizer)
    with seeded(0):
        transformer = QwenImage21Transformer2DModel(
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=text_encoder.config.text_config.hidden_size,
            axes_dims_rope=(4, 6, 6),
        )
    return QwenImage21Pipeline(
        # The scheduler settings of the real repository: a shift that grows with the image.
        scheduler=FlowMatchEulerDiscreteScheduler(**QWEN_IMAGE_BASE.scheduler.config),
        vae=autoencoders.tiny_qwen21_vae(),
        text_encoder=text_encoder,
        processor=tokenizers.qwen3_vl_processor(tokenizer),
        transformer=transformer,
    )
