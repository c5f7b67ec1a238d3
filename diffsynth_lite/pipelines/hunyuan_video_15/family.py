"""This file trains HunyuanVideo 1.5: clips from text, or from an image.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_hunyuan_video15.py``, ``pipeline_hunyuan_video1_5.py`` and
``pipeline_hunyuan_video1_5_image2video.py``; ``train.py`` of Tencent's HunyuanVideo-1.5.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextModel,
    SiglipImageProcessorPil,
    SiglipVisionModel,
    T5EncoderModel,
)

from diffsynth_lite.core.gradient import gradient_checkpoint_forward, unwrapped
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.spelling import JOINED_IN_COMFYUI
from diffsynth_lite.media import Generated, Media, Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.first_frame import (
    next_to_first_frame,
    preview_start,
    require_later_frames,
    start_code,
)
from diffsynth_lite.pipelines.base.model_function import (
    Checkpointing,
    checkpointed,
    mask_of,
    model_function,
    stacked,
)
from diffsynth_lite.pipelines.hunyuan_video_15.names import HUNYUAN_VIDEO_15_LAYERS
from diffsynth_lite.pipelines.hunyuan_video_15.prompts import (
    SYSTEM_MESSAGE,
    encode_prompts,
    num_tokens,
    padded,
    prompt_arguments,
)
from diffsynth_lite.pipelines.hunyuan_video_15.releases import HUNYUAN_VIDEO_15
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_TRAINED_SHIFT = 3.0
# The blocks of the token refiner, before these, have layers of the same names.
_BLOCKS = "transformer_blocks.*"
_ATTENTION = (
    *(f"{_BLOCKS}.attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"{_BLOCKS}.attn.{layer}" for layer in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
)
_FEED_FORWARD = tuple(f"{_BLOCKS}.{ff}.net.{end}" for ff in ("ff", "ff_context") for end in ("0.proj", "2"))


@model_function
def model_fn_hunyuan_video_15(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    glyph_embeds_bld: torch.Tensor | None = None,
    glyph_embeds_mask: torch.Tensor | None = None,
    image_embeds_bld: torch.Tensor | None = None,
    *,
    first_frame_bcfhw: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of HunyuanVideo 1.5, each transformer block run by the gradient engine.

    Args:
        transformer: a ``HunyuanVideo15Transformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 32, F, H, W), noisy normalised latents.
        timestep: (B,), in [0, 1000], in the dtype of the transformer.
        prompt_embeds_bld: (B, L, 3584) prompt embeddings, padded on the right.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.
        glyph_embeds_bld: (B, L, 1472), of words that shall be written, too; None where there are none.
        glyph_embeds_mask: (B, L), as that of the prompts.
        image_embeds_bld: (B, 729, 1152), of the image that clips start from; None for clips from text.
        first_frame_bcfhw: (B, 32, 1, H, W), clean normalised latents of that image.

    Returns:
        (B, 32, F, H, W), the predicted velocity ``noise - latents``.
    """
    config: Any = unwrapped(transformer).config
    if glyph_embeds_bld is None:
        glyph_embeds_bld = prompt_embeds_bld.new_zeros(len(prompt_embeds_bld), 0, config.text_embed_2_dim)
    if image_embeds_bld is None:
        # What diffusers takes for clips from text: all that is there is zero. It would be masked.
        image_embeds_bld = prompt_embeds_bld.new_zeros(len(prompt_embeds_bld), 0, config.image_embed_dim)
    with checkpointed(HunyuanVideo15, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bcfhw: torch.Tensor = transformer(
            hidden_states=next_to_first_frame(latents_bcfhw, first_frame_bcfhw),
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_attention_mask=mask_of(prompt_embeds_bld, prompt_embeds_mask),
            encoder_hidden_states_2=glyph_embeds_bld,
            encoder_attention_mask_2=mask_of(glyph_embeds_bld, glyph_embeds_mask),
            image_embeds=image_embeds_bld,
            return_dict=False,
        )[0]
    return velocity_bcfhw


class HunyuanVideo15(DiffusersFamily):
    """HunyuanVideo 1.5, text to video and image to video, at 480p and 720p.

    54 blocks, prompts by Qwen2.5-VL, a causal video VAE: 1/4 of the frames, 1/16 of the size. Text between
    quotation marks in a prompt is also read by ByT5, letter by letter: words to write in the clip.

    The folder decides whether clips are made from text only or from an image. A clip whose first frame the
    data does not name starts from the first one of its own, which the model also sees through SigLIP; all
    latents count in the loss, those of the given frame too. The two kinds have different weights.

    Diffusers' samplers have a shift of 5 to 9, by size and kind; Tencent's trainer trains with 3
    (``train.py``), as ``objective.shift: family`` does, and musubi-tuner's example has 2.

    Captions of images are read after the same system message as those of clips, which asks to describe a
    video: diffusers, musubi-tuner and ComfyUI have no other. Tencent's trainer puts one before them that
    asks to describe an image (``data_type`` in ``train.py``).

    Its pipelines load no LoRA; the transformer does:
    ``pipeline.transformer.load_lora_adapter(folder, use_safetensors=True)``. ComfyUI has queries, keys and
    values as one layer, and takes the file that ``diffsynth-lite convert --to comfyui`` makes of it.

    diffusers 0.42.1 gives the attention a mask of all pairs of tokens, a byte each, also where no token is
    masked: 2.4 GB for 121 frames of 848 x 480. The step-distilled release (``use_meanflow``), which takes two
    noise levels, is refused.
    """

    pipelines = (HunyuanVideo15Pipeline, HunyuanVideo15ImageToVideoPipeline)
    releases = HUNYUAN_VIDEO_15
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "hunyuan_video_15_lora.yaml"}
    transformer_class = HunyuanVideo15Transformer3DModel
    lora_spelling = JOINED_IN_COMFYUI
    lora_layers = HUNYUAN_VIDEO_15_LAYERS
    tokenizers = ("tokenizer", "tokenizer_2")
    block_lists = ("transformer_blocks",)
    masks_attention = "always"
    unused_matmuls = ("ff.net.2", "ff_context.net.2")
    size_divisor = 16
    frame_step = 4
    default_num_frames = 121
    default_fps = 24.0
    model_fn = model_fn_hunyuan_video_15
    num_timesteps = 1000
    prompt_id = "hunyuan_video_15/prompt/1"
    prompt_template = SYSTEM_MESSAGE
    max_prompt_tokens = 1000
    default_target_modules = _ATTENTION
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*_ATTENTION, *_FEED_FORWARD, "norm1.linear", "norm1_context.linear"),
    }
    unused_in_last_block = ("attn.add_q_proj", "attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2")

    @property
    def _starts_from_images(self) -> bool:
        return self.pipeline is HunyuanVideo15ImageToVideoPipeline

    @property
    def encoder_classes(self) -> Mapping[str, Any]:
        of_images = {"image_encoder": SiglipVisionModel} if self._starts_from_images else {}
        return {
            "text_encoder": Qwen2_5_VLTextModel,
            "text_encoder_2": T5EncoderModel,
            "vae": AutoencoderKLHunyuanVideo15,
            **of_images,
        }

    @property
    def components_without_weights(self) -> tuple[str, ...]:
        of_images = ("feature_extractor",) if self._starts_from_images else ()
        return (*super().components_without_weights, "guider", *of_images)

    @property
    def record_kinds(self) -> tuple[RecordKind, ...]:
        """From text clips and images; from an image clips, and clips with a first frame."""
        return ("video", "image_to_video") if self._starts_from_images else ("video", "image")

    @property
    def needs_inputs(self) -> bool:
        return self._starts_from_images

    @property
    def distilled(self) -> str | None:
        if self._guider_config.get("guidance_scale") != 1:
            return None
        return (
            "its guider has a scale of 1, as of models distilled to generate without guidance; better train "
            "the model that it was made from"
        )

    @cached_property
    def _guider_config(self) -> Mapping[str, Any]:
        return self.folder.component_config("guider")

    @cached_property
    def _guider(self) -> Any:
        return ClassifierFreeGuidance.from_config(self._guider_config)

    def check_folder(self, *, with_weights: bool = True) -> None:
        if self.folder.component_config("transformer").get("use_meanflow"):
            raise UserError(
                f"model.path: {self.folder.path / 'transformer'} has use_meanflow: a step-distilled model, "
                "which also takes the noise level of the next step and which training would undo; take the "
                "one that it was made from"
            )
        super().check_folder(with_weights=with_weights)

    def check_frames(self, num_frames: int, *, key: str) -> None:
        if self._starts_from_images:
            require_later_frames(num_frames, self.frame_step, key=key)
        super().check_frames(num_frames, key=key)

    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        encoders = self.load_text_encoders(dtype, device)
        tokenizers = [self.load_tokenizer(name) for name in self.tokenizers]

        def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
            texts = [prompt.text for prompt in prompts]
            return encode_prompts(encoders, tokenizers, texts, device, max_tokens=self.max_prompt_tokens)

        return encode

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        return num_tokens(self.load_tokenizer(), texts)

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        of_images = ("image_encoder", "feature_extractor") if self._starts_from_images else ()
        return f"hunyuan_video_15/latents/1 {self.folder.fingerprints('vae', *of_images)} {dtype}"

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = super().media_pipeline(dtype, device)
        pipeline.vae.enable_slicing()  # the attention of diffusers 0.42.1 fails on several clips at once
        return pipeline

    def image_parts(self, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        if not self._starts_from_images:
            return {}
        return {
            "image_encoder": self.load_component("image_encoder", dtype).to(device),
            "feature_extractor": SiglipImageProcessorPil.from_pretrained(
                self.folder.place("feature_extractor").path
            ),
        }

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        """Of the image that a clip starts from: (C, 1, H, W), and (L, D)."""
        assert item.last_frame is None, "refused with the records"
        if not self._starts_from_images:
            return {}
        first, device = item.first_frame or item.frames[0], pipeline.vae.device
        width, height = first.size
        vae, processor = pipeline.vae, pipeline.video_processor
        latents_bcfhw = pipeline._get_image_latents(vae, processor, first, height, width, device)
        seeing = pipeline.image_encoder, pipeline.feature_extractor
        embeds_bld = pipeline._get_image_embeds(*seeing, first, device)
        return {"first_frame_latents": latents_bcfhw[0].float().cpu(), "image_embeds": embeds_bld[0].cpu()}

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """3, as in Tencent's trainer; less where the folder's sampler has less."""
        return min(super().family_shift(latents_shape), _TRAINED_SHIFT)

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        return sum(map(math.prod, self._start_shapes(latents_shape).values()))

    def _start_shapes(self, latents_shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        if not self._starts_from_images:
            return {}
        channels, _, height, width = latents_shape
        config = self.folder.component_config("image_encoder")
        num_tokens = (config["image_size"] // config["patch_size"]) ** 2
        return {
            "first_frame_latents": (channels, 1, height, width),
            "image_embeds": (num_tokens, config["hidden_size"]),
        }

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        config = self.folder.component_config("transformer")
        starts = self._start_shapes(latents_shape)
        return {
            "prompt_embeds": torch.ones(self.max_prompt_tokens, config["text_embed_dim"]),
            "glyph_embeds": torch.ones(0, config["text_embed_2_dim"]),
            **{name: torch.ones(shape) for name, shape in starts.items()},
        }

    def timestep(self, sigma: torch.Tensor, like: Mapping[str, Any]) -> torch.Tensor:
        # The model takes it in its own dtype only, as the pipelines give it.
        return super().timestep(sigma, like).to(**like)

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        glyph_embeds_bld, glyph_mask = padded(conditioning, "glyph_embeds", like)
        given = {"glyph_embeds_bld": glyph_embeds_bld, "glyph_embeds_mask": glyph_mask}
        if self._starts_from_images:
            given |= {
                "first_frame_bcfhw": stacked(conditioning, "first_frame_latents", like),
                "image_embeds_bld": stacked(conditioning, "image_embeds", like),
            }
        return super().model_inputs(conditioning, like) | given

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return start_code(request)

    def usage_setup(self, request: PreviewRequest) -> Sequence[str]:
        if not self._starts_from_images:
            return ()
        return (
            "# The size is that of the image, not the nearest of a list.",
            "def size_of_image(height, width, target_size):",
            "    return height, width",
            "pipeline.video_processor.calculate_default_height_width = size_of_image",
        )

    @property
    def takes_size(self) -> bool:
        """From images it takes the nearest to that of the image in a list of its own."""
        return not self._starts_from_images

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        return prompt_arguments(prompt, like)

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return {**preview_start(request)}

    def generate(self, pipeline: Any, request: PreviewRequest) -> Generated:
        # One for all previews: diffusers warns of each that is made.
        self._guider.guidance_scale = request.guidance_scale
        (self._guider.enable if request.is_guided else self._guider.disable)()
        pipeline.guider = self._guider
        if self._starts_from_images:
            pipeline.video_processor.calculate_default_height_width = _size_of_image
        return super().generate(pipeline, request)


def _size_of_image(height: int, width: int, target_size: int) -> tuple[int, int]:
    return height, width


def tiny() -> HunyuanVideo15Pipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second: text to video.

    Two blocks of 32 channels, and 4 latent channels; the real compression, and the sampler of 480p.
    """
    tokenizer = tokenizers.qwen2_tokenizer(
        template_texts=(f"system\n{SYSTEM_MESSAGE}", "user\n", "assistant\n", "\n")
    )
    tokenizer_2, text_encoder, vae = (
        ByT5Tokenizer(),
        text_encoders.tiny_qwen2_5_vl_text(tokenizer),
        autoencoders.tiny_hunyuan_video_15_vae(),
    )
    text_encoder_2 = text_encoders.tiny_t5(tokenizer_2)
    return HunyuanVideo15Pipeline(
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=tiny_transformer(
            in_channels=2 * vae.config.latent_channels + 1,
            out_channels=vae.config.latent_channels,
            text_embed_dim=text_encoder.config.hidden_size,
            text_embed_2_dim=text_encoder_2.config.d_model,
        ),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )


def tiny_transformer(*, seed: int = 0, **layout: int) -> HunyuanVideo15Transformer3DModel:
    """A random transformer in eval mode: two blocks of 32 channels."""
    with seeded(seed):
        return HunyuanVideo15Transformer3DModel(
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            attention_head_dim=16,
            image_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
            **layout,
        ).eval()
