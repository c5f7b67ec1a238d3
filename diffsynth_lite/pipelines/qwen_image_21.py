"""This file trains Qwen-Image 2.1 (text to image).

Layouts: b batch, c latent channels, f frames (1), h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_qwenimage21.py`` and ``pipeline_qwenimage21.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from torch.nn.functional import pad
from transformers import BatchEncoding, CLIPImageProcessorPil, LlavaProcessor, Qwen3VLForConditionalGeneration

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, Original, under
from diffsynth_lite.lora.shared_names import DOUBLE, EMBEDDER, QKV
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.pipelines.qwen_image import IMAGE_TOKEN, PLACEHOLDERS, QWEN_IMAGE_BASE
from diffsynth_lite.releases.components import MUSUBI, encoder_sizes
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_SLOT = 4  # places of the latents to one of the mask; a literal in the pipeline


@model_function
def model_fn_qwen_image_21(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Qwen-Image 2.1, each transformer block run by the gradient engine.

    Args:
        transformer: a ``QwenImage21Transformer2DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 64, 1, H, W), noisy normalised latents, H and W even.
        timestep: (B,), noise level in [0, 1].
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded on the right. The position of the image depends
            on L, padding included.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.

    Returns:
        (B, 64, 1, H, W), the predicted velocity ``noise - latents``.
    """
    batch, channels, _, height, width = latents_bcfhw.shape
    num_places = height * width
    # The model reads the mask's numbers back, and meta has none: there they stay on the CPU.
    device = torch.device("cpu") if latents_bcfhw.is_meta else latents_bcfhw.device
    of_text = torch.zeros(prompt_embeds_bld.shape[:2], dtype=torch.bool, device=device)
    with checkpointed(QwenImage21, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            hidden_states=QwenImage21Pipeline._pack_latents(latents_bcfhw, batch, channels, height, width),
            encoder_hidden_states=prompt_embeds_bld,
            timestep=timestep,
            img_shapes=[[(1, height, width)]] * batch,
            img_mask=pad(of_text, (0, num_places // _SLOT), value=True),
            encoder_hidden_states_mask=None if prompt_embeds_mask is None else prompt_embeds_mask.bool(),
            return_dict=False,
        )[0]
    velocity_bcfhw: torch.Tensor = QwenImage21Pipeline._unpack_latents(
        velocity_bld[:, -num_places:], height, width, vae_scale_factor=1
    )
    return velocity_bcfhw


_README = "QwenLM/Qwen-Image-2.1, README.md"
_NOTES = "libwaifu, a public runtime, notes on Qwen-Image 2.1 from the published files"
_FIZGIG = "Fizgig, a public trainer, src/fizgig/families/qwen_image.py"
QWEN3_VL_8B = ReleaseComponent(
    "Qwen3VLModel",
    {
        "text_config": {"model_type": "qwen3_vl_text", **encoder_sizes(4096, 12288, 32, 36, 8, 151936, 128)},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
        },
        "tie_word_embeddings": False,
    },
    dtype="bfloat16",
    source=f"{MUSUBI}ideogram4/ideogram4_utils.py: Qwen3-VL-8B-Instruct",
)
QWEN3_VL_8B_LM = replace(
    QWEN3_VL_8B,
    class_name="Qwen3VLForConditionalGeneration",
    source=f"{_NOTES}; settings as in {QWEN3_VL_8B.source}; dtype from the 17.5 GB of its files",
)
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
        "text_encoder": QWEN3_VL_8B_LM,
        "vae": ReleaseComponent(
            "AutoencoderKLQwenImage21",
            dtype="float32",
            source=f"{_NOTES}: the defaults of the class; dtype from the 1.35 GB in {_FIZGIG}",
        ),
    },
    scheduler=replace(QWEN_IMAGE_BASE.scheduler, source=_NOTES),
    tokenizers={"processor": ReleaseTokenizer("Qwen3VLProcessor", ("tokenizer.json",))},
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


class QwenImage21(DiffusersFamily):
    """Qwen-Image 2.1, from text.

    32 single-stream blocks, Qwen3-VL prompts, an autoencoder of its own: 64 channels at 1/16 size, and a
    channel for transparency, which is full in training. Images to start from, which the pipeline takes as
    well, are not trained yet.

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
    adapter is active during training that is removed afterwards, and offers one.

    No layer of the last block is unused: text and image share its weights.
    """

    pipelines = (QwenImage21Pipeline,)
    releases = (_RELEASE,)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "qwen_image_21_lora.yaml"}
    transformer_class = QwenImage21Transformer2DModel
    lora_spelling = taken_by_comfyui(by_kohya_names=False)
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen3VLForConditionalGeneration,
        "vae": AutoencoderKLQwenImage21,
    }
    tokenizers = ("processor",)
    block_lists = ("transformer_blocks",)
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
    def prompt_template(self) -> str:
        template: str = _Pipeline().prompt_template_t2i
        return template

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        processor = _Texts(self.load_tokenizer("processor"), self.max_prompt_tokens)
        return _Pipeline(processor=processor, **self.load_text_encoders(dtype, device), **settings)

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        # One by one: the pipeline pads a batch on the left, and rounding would depend on other prompts.
        rows = [pipeline.encode_prompt(prompt.text, device=device)[0][0] for prompt in prompts]
        return [{"prompt_embeds": row_ld.cpu()} for row_ld in rows]

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the end of the chat around each text, which counts too; the instruction before it does not."""
        texts_of = _Texts(self.load_tokenizer("processor"), self.max_prompt_tokens)
        pipeline = _Pipeline(processor=texts_of)
        chats = [pipeline.prompt_template_t2i.format(text or " ") for text in texts]
        return [len(tokens) - pipeline._drop_idx for tokens in texts_of.tokenizer(chats)["input_ids"]]

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        return super().encode_pixels(vae, pad(pixels, (0, 0, 0, 0, 0, 1), value=1.0))  # opaque


class _Texts:
    """What ``Qwen3VLProcessor`` does of texts only, without torchvision, which that class needs."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self._num_before = 0

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], *, tokenize: bool, return_dict: bool
    ) -> list[list[int]]:
        """Tokens of what is before each prompt, which the pipeline needs to remove them."""
        chats: list[list[int]] = self.tokenizer.apply_chat_template(
            [list(conversation)], tokenize=tokenize, return_dict=return_dict
        )
        self._num_before = len(chats[0])
        return chats

    def __call__(
        self, *, text: Sequence[str], padding: bool, padding_side: str, return_tensors: str
    ) -> BatchEncoding:
        """Token ids, cut after as many tokens of the prompt as there may be."""
        encoded: BatchEncoding = self.tokenizer(
            list(text),
            padding=padding,
            padding_side=padding_side,
            truncation=True,
            max_length=self._num_before + self.max_tokens,
            return_tensors=return_tensors,
        )
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


def tiny_processor(tokenizer: Any) -> LlavaProcessor:
    """A processor that does with texts what ``Qwen3VLProcessor`` does, without torchvision."""
    images = CLIPImageProcessorPil()
    return LlavaProcessor(images, tokenizer, chat_template=tokenizer.chat_template, image_token=IMAGE_TOKEN)


def tiny() -> QwenImage21Pipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels; 64 latent channels at 1/16 size with the real model's statistics. Its processor
    does the same with texts as that of the released model, whose class needs torchvision.
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
        processor=tiny_processor(tokenizer),
        transformer=transformer,
    )
