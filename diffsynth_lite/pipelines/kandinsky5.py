"""This file trains Kandinsky 5.0 Image Lite (text to image).

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_kandinsky.py`` and ``pipeline_kandinsky_t2i.py``; for what ComfyUI calls its
layers, ``comfy/ldm/kandinsky5/model.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5T2IPipeline,
    Kandinsky5Transformer3DModel,
)
from diffusers.pipelines.kandinsky5.pipeline_kandinsky_t2i import prompt_clean
from transformers import CLIPTextModel, Qwen2_5_VLForConditionalGeneration

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.core.gradient.blocks import unwrapped
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, under
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import Generated, Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function, stacked
from diffsynth_lite.pipelines.qwen_image import PLACEHOLDERS, QWEN_TEXT_ENCODER
from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent, ReleaseTokenizer
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
NUM_POSITIONS = 128
"""Frames, rows and columns of tokens that the transformer has positions for."""
_PROJECTIONS = ("to_query", "to_key", "to_value", "out_layer")
_ATTENTION = tuple(f"{kind}_attention.{layer}" for kind in ("self", "cross") for layer in _PROJECTIONS)
_FEED_FORWARD = ("feed_forward.in_layer", "feed_forward.out_layer")
_MODULATION = ("text_modulation.out_layer", "visual_modulation.out_layer")


@model_function
def model_fn_kandinsky5(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    pooled_prompt_embeds_bd: torch.Tensor,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Kandinsky 5.0, each transformer block run by the gradient engine.

    Args:
        transformer: a ``Kandinsky5Transformer3DModel`` without ``visual_cond``, plain or wrapped by DDP.
        latents_bchw: (B, 16, H, W), noisy normalised latents, H and W even and at most 256.
        timestep: (B,), in [0, 1000].
        prompt_embeds_bld: (B, L, 3584) prompt embeddings of Qwen2.5-VL, of one length: nothing hides padding.
        pooled_prompt_embeds_bd: (B, 768) prompt embeddings of CLIP.

    Returns:
        (B, 16, H, W), the predicted velocity ``noise - latents``.
    """
    with checkpointed(Kandinsky5, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bfhwc: torch.Tensor = transformer(
            **with_positions(latents_bchw.movedim(1, -1)[:, None], prompt_embeds_bld),
            timestep=timestep,
            pooled_projections=pooled_prompt_embeds_bd,
            scale_factor=(1.0, 1.0, 1.0),
            return_dict=True,
        ).sample
    return velocity_bfhwc[:, 0].movedim(-1, 1)


def with_positions(latents_bfhwc: torch.Tensor, prompt_embeds_bld: torch.Tensor) -> dict[str, Any]:
    """Latents and prompts with the positions of their tokens, as arguments of the transformer."""
    device = latents_bfhwc.device
    _, num_frames, height, width, _ = latents_bfhwc.shape
    return {
        "hidden_states": latents_bfhwc,
        "encoder_hidden_states": prompt_embeds_bld,
        "visual_rope_pos": [
            torch.arange(count, device=device) for count in (num_frames, height // _PATCH, width // _PATCH)
        ],
        "text_rope_pos": torch.arange(prompt_embeds_bld.shape[1], device=device),
    }


_AUTHORS = "kandinskylab/kandinsky-5, configs/k5_lite_t2i_sft_hd.yaml"
_PLAKAT = "plakat, a public program, its RFC KANDINSKY-1, which quotes the repository's files"

KANDINSKY5_IMAGE = Release(
    name="Kandinsky 5.0 T2I Lite",
    hub_id="kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers",
    pipeline_class="Kandinsky5T2IPipeline",
    components={
        "transformer": ReleaseComponent(
            "Kandinsky5Transformer3DModel",
            {
                "axes_dims": (32, 48, 48),
                "ff_dim": 10240,
                "in_visual_dim": 16,
                "model_dim": 2560,
                "num_visual_blocks": 50,
                "out_visual_dim": 16,
            },
            dtype="bfloat16",
            source=f"{_AUTHORS}; dtype: {_PLAKAT}",
        ),
        "text_encoder": replace(QWEN_TEXT_ENCODER, source=f"{QWEN_TEXT_ENCODER.source}; {_PLAKAT}"),
        "text_encoder_2": replace(known.CLIP_L, dtype="float32", num_bytes=None),
        "vae": known.FLUX_VAE,
    },
    scheduler=known.flow_euler(5.0, _PLAKAT),
    tokenizers={"tokenizer": ReleaseTokenizer("Qwen2VLProcessor"), "tokenizer_2": known.CLIP_TOKENIZER},
    size=(1024, 1024, 1),
    parameters=6e9,
    licence="MIT",
    gated=None,
    architecture="Kandinsky-5",
    version="kandinsky5",
    sources={
        "pipeline": "docstring of the pipeline in diffusers",
        "size": "defaults of the pipeline's call",
        "parameters": "the collection of its authors on the hub, kandinsky-50-image-lite",
        "licence": "the model's page on the hub",
        "architecture": f"{known.MUSUBI}utils/sai_model_spec.py, dataset/architectures.py",
    },
    unconfirmed=("files of the tokenizers", "dtype of CLIP and of the autoencoder"),
)
_PRETRAIN = KANDINSKY5_IMAGE.but(
    "Kandinsky 5.0 T2I Lite pretrain",
    "kandinskylab/Kandinsky-5.0-T2I-Lite-pretrain-Diffusers",
    unconfirmed=(*KANDINSKY5_IMAGE.unconfirmed, "that its settings are those of the other"),
)

_EMBEDDER = ("in_layer", "out_layer")
_LORA_LAYERS = LayerNames(
    layers=(
        *under("text_transformer_blocks.*.self_attention", _PROJECTIONS),
        *under("text_transformer_blocks.*", (*_FEED_FORWARD, _MODULATION[0])),
        *under("visual_transformer_blocks.*", (*_ATTENTION, *_FEED_FORWARD, _MODULATION[1])),
        *under("time_embeddings", _EMBEDDER),
        *(f"{part}_embeddings.in_layer" for part in ("text", "pooled_text", "visual")),
        *under("out_layer", ("modulation.out_layer", "out_layer")),
    )
)


class Kandinsky5(DiffusersFamily):
    """Kandinsky 5.0 Image Lite, from text.

    50 blocks of self- and cross-attention, after two that read the prompt, which is by Qwen2.5-VL and CLIP;
    16 channels at 1/8 size, of the autoencoder of FLUX.1, whose shift is not used.

    Nothing hides padding from the text encoder or the model: items of prompts of different lengths go through
    the model one length after another, and count as they do by themselves. Processes that share its weights
    (`memory.shard_base`) therefore take one sample at a time.

    Its pipeline generates in seven sizes of about a megapixel, and takes the nearest of them for any other.
    Previews have the size that is asked for, and the code of model cards says how. No side may have more than
    2,048 pixels.

    The template of the prompt is that of diffusers, which has corrected a word of it, "promt": its authors'
    own program, and perhaps its training, has another token there.

    The sampler's shift is 5 at any size. musubi-tuner trains Kandinsky 5 with the same
    (`docs/kandinsky5.md`), and a density around the middle; its authors' own program generates images with 3.

    ComfyUI takes its LoRA files as they are. Models of Kandinsky 5 that edit images are not trained here.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (Kandinsky5T2IPipeline,)
    releases: ClassVar[tuple[Release, ...]] = (KANDINSKY5_IMAGE, _PRETRAIN)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "kandinsky5_image_lora.yaml"}
    transformer_class = Kandinsky5Transformer3DModel
    lora_spelling = taken_by_comfyui()
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen2_5_VLForConditionalGeneration,
        "text_encoder_2": CLIPTextModel,
        "vae": AutoencoderKL,
    }
    tokenizers = ("tokenizer", "tokenizer_2")
    block_lists = ("text_transformer_blocks", "visual_transformer_blocks")
    unused_matmuls = ("self_attention.out_layer", "cross_attention.out_layer", "feed_forward.out_layer")
    size_divisor = 16
    max_side = NUM_POSITIONS * size_divisor
    # Of Qwen2.5-VL. CLIP, which gives one vector for the whole text, reads 77 tokens of its own.
    max_prompt_tokens = 512
    patch = _PATCH
    model_fn: ClassVar[Callable[..., Any]] = model_fn_kandinsky5
    num_timesteps = 1000
    prompt_id = "kandinsky5/prompt/1"
    latents_id = "kandinsky5/latents/1"
    prompt_outputs = ("prompt_embeds", "pooled_prompt_embeds")
    prompt_width, pooled_width = "in_text_dim", "in_text_dim2"
    images_output = "image"
    refused_in_prompts = PLACEHOLDERS
    splits_batches = True
    visual_cond = False
    """Whether the transformer is also given clean latents, and which they are."""
    default_target_modules = (*_ATTENTION, *_FEED_FORWARD)
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*default_target_modules, *_MODULATION),
    }

    @property
    def prompt_template(self) -> str:
        template: str = assemble(self.pipeline).prompt_template
        return template

    def check_folder(self, *, with_weights: bool = True) -> None:
        super().check_folder(with_weights=with_weights)
        config = self.folder.component_config("transformer")
        if bool(config.get("visual_cond")) != self.visual_cond:
            raise UserError(
                f"model.path: {config.file}: visual_cond must be {str(self.visual_cond).lower()} in folders "
                f"of {self.pipeline.__name__}: this transformer is another one"
            )

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        """With the end of the chat around each text, which counts too; the instruction before it does not."""
        num_before = assemble(self.pipeline).prompt_template_encode_start_idx
        chats = [self.prompt_template.format(prompt_clean(text)) for text in texts]
        return [len(tokens) - num_before for tokens in self.load_tokenizer()(chats)["input_ids"]]

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        # One by one: next to a longer prompt the pipeline gives one the rows of its padding as well.
        encode = super().encode_prompts
        return [encode(pipeline, [prompt], device)[0] for prompt in prompts]

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = super().media_pipeline(dtype, device)
        pipeline.vae.register_to_config(shift_factor=None)  # the pipeline only scales
        return pipeline

    def input_like(self, transformer: torch.nn.Module) -> dict[str, Any]:
        """Of a norm: diffusers keeps the time embedding and the modulation in fp32."""
        return device_and_dtype(unwrapped(transformer).get_submodule("text_embeddings.norm"))

    def timestep(self, sigma: torch.Tensor, like: Mapping[str, Any]) -> torch.Tensor:
        return super().timestep(sigma, like).to(**like)

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "prompt_embeds_bld": stacked(conditioning, "prompt_embeds", like),
            "pooled_prompt_embeds_bd": stacked(conditioning, "pooled_prompt_embeds", like),
        }

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        given = super().prompt_argument(prompt, like)
        embeds_bld = given["prompt_embeds"]
        return {
            "prompt_embeds_qwen": embeds_bld,
            "prompt_embeds_clip": given["pooled_prompt_embeds"],
            "prompt_cu_seqlens": torch.tensor([0, embeds_bld.shape[1]], device=embeds_bld.device),
        }

    def usage_setup(self, request: PreviewRequest) -> list[str]:
        size = request.width, request.height
        if size in assemble(self.pipeline).resolutions:
            return []
        return ["# Else the nearest of the sizes that it knows.", f"pipeline.resolutions = [{size}]"]

    def generate(self, pipeline: Any, request: PreviewRequest) -> Generated:
        pipeline.resolutions = [(request.width, request.height)]
        return super().generate(pipeline, request)


def tiny() -> Kandinsky5T2IPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    16 latent channels at 1/8 size with the real model's statistics.
    """
    return tiny_pipeline(Kandinsky5T2IPipeline, autoencoders.tiny_flux_vae())


def tiny_pipeline(pipeline_class: Any, vae: Any, **layout: Any) -> Any:
    """A small pipeline of Kandinsky 5: a transformer of two blocks of each kind, of 48 channels.

    Its processor does the same with texts as that of the released model, whose class needs torchvision.
    """
    template = assemble(pipeline_class).prompt_template
    for two_tokens in (("dynam", "ism"), ("post", "processing"), ("sc", "ren")):  # as in the real vocabulary
        template = template.replace("".join(two_tokens), "\n".join(two_tokens))
    tokenizer = tokenizers.qwen2_tokenizer(template_texts=[template])
    tokenizer_2 = tokenizers.clip_tokenizer()
    text_encoder = text_encoders.tiny_qwen2_5_vl(tokenizer)
    text_encoder_2 = text_encoders.tiny_clip_text(tokenizer_2)
    # With these widths its file has weights at multiples of 16 bytes: else those that are read from it and a
    # copy of them give a single row other last digits.
    with seeded(0):
        transformer = Kandinsky5Transformer3DModel(
            in_visual_dim=vae.config.latent_channels,
            in_text_dim=text_encoder.config.text_config.hidden_size,
            in_text_dim2=text_encoder_2.config.hidden_size,
            time_dim=24,
            out_visual_dim=vae.config.latent_channels,
            model_dim=48,
            ff_dim=96,
            num_text_blocks=2,
            num_visual_blocks=2,
            axes_dims=(4, 6, 6),
            **layout,
        )
        for name, parameter in transformer.named_parameters():
            if "modulation" in name:  # zeros, with which no block would do anything
                torch.nn.init.normal_(parameter, std=0.3)
    return pipeline_class(
        transformer=transformer,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizers.qwen3_vl_processor(tokenizer),
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        scheduler=FlowMatchEulerDiscreteScheduler(**KANDINSKY5_IMAGE.scheduler.config),
    )
