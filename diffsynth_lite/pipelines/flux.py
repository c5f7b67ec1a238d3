"""This file trains FLUX.1 (text to image): dev, which takes a guidance scale, and schnell, which does not.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_flux.py`` and ``pipeline_flux.py``; for names in files of others,
its ``lora_conversion_utils.py`` (XLabs') and DiffSynth-Studio's ``utils/lora/flux.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.core.parallel import SequenceSplit
from diffsynth_lite.lora import shared_names as shared
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, fused, renamed, renamed_in, under
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_EMBEDS = ("prompt_embeds", "pooled_prompt_embeds")
_PATCH = 2
"""Latents to a side of a token."""
SINGLE_STREAM = ("proj_mlp", "single_transformer_blocks.*.proj_out")
"""Of the single-stream blocks, next to attention; ``proj_out`` would also be the model's last layer."""
_MODULATION = ("norm1.linear", "norm1_context.linear", "norm.linear")


@model_function
def model_fn_flux(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    pooled_prompt_embeds_bd: torch.Tensor,
    guidance: torch.Tensor | None = None,
    *,
    input_latents_bchw: torch.Tensor | None = None,
    condition_bld: torch.Tensor | None = None,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of FLUX.1, each transformer block run by the gradient engine.

    Args:
        transformer: a ``FluxTransformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 16, H, W), noisy normalised latents, H and W even.
        timestep: (B,), noise level in [0, 1].
        prompt_embeds_bld: (B, L, D) prompt embeddings of T5, padded; there is no mask.
        pooled_prompt_embeds_bd: (B, D_pooled) prompt embeddings of CLIP.
        guidance: (B,), guidance scale; None for models without ``guidance_embeds``.
        input_latents_bchw: (B, 16, H_i, W_i), clean normalised latents of the image to edit.
        condition_bld: (B, H * W / 4, D), further channels of the tokens of the noisy image.

    Returns:
        (B, 16, H, W), the predicted velocity ``noise - latents``.
    """
    height, width = latents_bchw.shape[-2:]
    images = [latents_bchw] if input_latents_bchw is None else [latents_bchw, input_latents_bchw]
    tokens_bld, positions = pack_images(images)
    if condition_bld is not None:
        tokens_bld = torch.cat([tokens_bld, condition_bld], dim=2)
    with checkpointed(Flux, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            hidden_states=tokens_bld,
            timestep=timestep,
            guidance=guidance,
            pooled_projections=pooled_prompt_embeds_bd,
            encoder_hidden_states=prompt_embeds_bld,
            txt_ids=torch.zeros(prompt_embeds_bld.shape[1], 3, device=latents_bchw.device),
            img_ids=positions,
            return_dict=False,
        )[0]
    return unpack_image(velocity_bld, height, width)


def pack_images(images: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of images, each of 2 x 2 latents, one after the other, and the place of each token.

    Args:
        images: each (B, C, H_i, W_i), its latents, H_i and W_i even.

    Returns:
        (B, L, 4 C), with L the sum of H_i * W_i / 4; and (L, 3), of each token the place of its image in
        ``images``, its row and its column.
    """
    tokens_bld = [FluxPipeline._pack_latents(image, *image.shape) for image in images]
    positions = [_positions(image, place) for place, image in enumerate(images)]
    return torch.cat(tokens_bld, dim=1), torch.cat(positions)


def unpack_image(tokens_bld: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The first image in a sequence of tokens.

    Args:
        tokens_bld: (B, L, 4 C), L at least height * width / 4.
        height: of its latents, even.
        width: of its latents, even.

    Returns:
        (B, C, height, width).
    """
    image_bchw: torch.Tensor = FluxPipeline._unpack_latents(
        tokens_bld[:, : height * width // _PATCH**2], height, width, vae_scale_factor=1
    )
    return image_bchw


def _positions(image_bchw: torch.Tensor, place: int) -> torch.Tensor:
    batch, _, height, width = image_bchw.shape
    positions: torch.Tensor = FluxPipeline._prepare_latent_image_ids(
        batch, height // _PATCH, width // _PATCH, image_bchw.device, torch.float32
    )
    positions[:, 0] = place
    return positions


FLUX_FOLDER = f"{known.FORGE}black-forest-labs/FLUX.1-dev"

FLUX_DEV = Release(
    name="FLUX.1 dev",
    hub_id="black-forest-labs/FLUX.1-dev",
    pipeline_class="FluxPipeline",
    components={
        "transformer": ReleaseComponent(
            "FluxTransformer2DModel",
            {"guidance_embeds": True},
            dtype="bfloat16",
            num_bytes=23802816640,
            source=f"{FLUX_FOLDER}/transformer",
        ),
        "text_encoder": known.CLIP_L,
        "text_encoder_2": known.T5_XXL,
        "vae": known.FLUX_VAE,
    },
    scheduler=known.FLUX_SCHEDULER,
    tokenizers={"tokenizer": known.CLIP_TOKENIZER, "tokenizer_2": known.T5_TOKENIZER_BOTH},
    size=(1024, 1024, 1),
    parameters=12e9,
    licence="FLUX.1 [dev] Non-Commercial License",
    gated=True,
    architecture="flux-1-dev",
    version="flux1",
    sources={
        "pipeline": f"{FLUX_FOLDER}; spiece.model: {known.SDNEXT}flux/tokenizer_2",
        "size": "`default_sample_size` of the pipeline",
        "parameters": "black-forest-labs/flux, model_cards/FLUX.1-dev.md",
        "licence": f"black-forest-labs/flux, README.md; gated: {known.LICENCES}",
        "architecture": f"{known.SD_SCRIPTS}sai_model_spec.py, flux_utils.py",
    },
)

_SCHNELL = FLUX_DEV.but(
    "FLUX.1 schnell",
    "black-forest-labs/FLUX.1-schnell",
    transformer=ReleaseComponent(
        "FluxTransformer2DModel",
        dtype="bfloat16",
        num_bytes=23782357120,
        source=f"{known.FORGE}black-forest-labs/FLUX.1-schnell/transformer",
    ),
    scheduler=ReleaseComponent(
        "FlowMatchEulerDiscreteScheduler", source=f"{known.FORGE}black-forest-labs/FLUX.1-schnell/scheduler"
    ),
    licence="Apache-2.0",
    gated=None,
    distilled="1 to 4 steps without guidance",
    architecture="flux-1-schnell",
    sources={
        "pipeline": f"{known.FORGE}black-forest-labs/FLUX.1-schnell",
        "parameters": "black-forest-labs/flux, model_cards/FLUX.1-schnell.md",
    },
)

_KREA = FLUX_DEV.but(
    "FLUX.1 Krea dev",
    "black-forest-labs/FLUX.1-Krea-dev",
    sources={"parameters": "black-forest-labs/flux, model_cards/FLUX.1-Krea-dev.md"},
    unconfirmed=("that its settings are those of FLUX.1 dev", "whether it is gated"),
)


_TIME_AND_TEXT = tuple(
    f"time_text_embed.{part}.{layer}"
    for part in ("timestep_embedder", "guidance_embedder", "text_embedder")
    for layer in shared.EMBEDDER
)
_LORA_LAYERS = LayerNames(
    layers=(
        *under(
            shared.DOUBLE,
            (*shared.JOINT_ATTENTION, *shared.FLUX_FEED_FORWARD, "norm1.linear", "norm1_context.linear"),
        ),
        *under(shared.SINGLE, (*shared.FLUX_SINGLE, "norm.linear")),
        *_TIME_AND_TEXT,
        *("x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
    ),
    kohya={
        **shared.FLUX_BLOCKS,
        "double_blocks.*.img_mod.lin": renamed(f"{shared.DOUBLE}.norm1.linear"),
        "double_blocks.*.txt_mod.lin": renamed(f"{shared.DOUBLE}.norm1_context.linear"),
        "single_blocks.*.modulation.lin": renamed(f"{shared.SINGLE}.norm.linear"),
        **renamed_in(
            {
                "time_in": "time_text_embed.timestep_embedder",
                "guidance_in": "time_text_embed.guidance_embedder",
                "vector_in": "time_text_embed.text_embedder",
            },
            shared.ORIGINAL_EMBEDDER,
        ),
        "final_layer.adaLN_modulation.1": shared.LAST_NORM,
    },
    others={
        # DiffSynth-Studio's
        "blocks.*.attn.a_to_qkv": shared.FLUX_BLOCKS["double_blocks.*.img_attn.qkv"],
        "blocks.*.attn.b_to_qkv": shared.FLUX_BLOCKS["double_blocks.*.txt_attn.qkv"],
        "blocks.*.attn.a_to_out": renamed(f"{shared.DOUBLE}.attn.to_out.0"),
        "blocks.*.attn.b_to_out": renamed(f"{shared.DOUBLE}.attn.to_add_out"),
        "blocks.*.ff_a.0": renamed(f"{shared.DOUBLE}.ff.net.0.proj"),
        "blocks.*.ff_a.2": renamed(f"{shared.DOUBLE}.ff.net.2"),
        "blocks.*.ff_b.0": renamed(f"{shared.DOUBLE}.ff_context.net.0.proj"),
        "blocks.*.ff_b.2": renamed(f"{shared.DOUBLE}.ff_context.net.2"),
        "blocks.*.norm1_a.linear": renamed(f"{shared.DOUBLE}.norm1.linear"),
        "blocks.*.norm1_b.linear": renamed(f"{shared.DOUBLE}.norm1_context.linear"),
        "single_blocks.*.to_qkv_mlp": shared.FLUX_BLOCKS["single_blocks.*.linear1"],
        "single_blocks.*.proj_out": renamed(f"{shared.SINGLE}.proj_out"),
        "single_blocks.*.norm.linear": renamed(f"{shared.SINGLE}.norm.linear"),
        # XLabs'
        "double_blocks.*.processor.qkv_lora1": shared.FLUX_BLOCKS["double_blocks.*.img_attn.qkv"],
        "double_blocks.*.processor.qkv_lora2": shared.FLUX_BLOCKS["double_blocks.*.txt_attn.qkv"],
        "double_blocks.*.processor.proj_lora1": renamed(f"{shared.DOUBLE}.attn.to_out.0"),
        "double_blocks.*.processor.proj_lora2": renamed(f"{shared.DOUBLE}.attn.to_add_out"),
        "single_blocks.*.processor.qkv_lora": fused(*under(f"{shared.SINGLE}.attn", shared.QKV)),
        "single_blocks.*.processor.proj_lora": renamed(f"{shared.SINGLE}.proj_out"),
    },
)


class Flux(DiffusersFamily):
    """FLUX.1 dev and schnell, from text.

    19 dual-stream and 38 single-stream blocks, T5 and CLIP prompts, 16 channels at 1/8 size. No layer of the
    last block is unused: the single-stream blocks use the same weights for text and image.

    dev takes a guidance scale as an input, with the noise level. Training gives it 1, which asks for no
    guidance, because the target is that of the data only, unless ``objective.guidance_target`` guides the
    target; previews give it ``validation.guidance_scale``. schnell takes none: a scale above 1 makes its
    previews run the model twice, with the negative prompt.

    The sampler's shift grows with the image: ``flux_shift`` of musubi-tuner is the same line, with a
    density around the middle; diffusers' training scripts shift nothing, and DiffSynth-Studio takes 3.
    schnell's sampler has none.
    """

    pipelines: ClassVar[tuple[Any, ...]] = (FluxPipeline,)
    releases: ClassVar[tuple[Release, ...]] = (FLUX_DEV, _KREA, _SCHNELL)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "flux_lora.yaml"}
    transformer_class = FluxTransformer2DModel
    lora_spelling = taken_by_comfyui()
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS, "text_encoder": shared.CLIP}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": CLIPTextModel,
        "text_encoder_2": T5EncoderModel,
        "vae": AutoencoderKL,
    }
    tokenizers: ClassVar[tuple[str, ...]] = ("tokenizer", "tokenizer_2")
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    unused_matmuls = ("ff.net.2", "ff_context.net.2", "proj_out")
    sequence_split = SequenceSplit(prompts="split")
    size_divisor = 16
    patch = _PATCH
    model_fn = model_fn_flux
    prompt_id = "flux/prompt/1"
    latents_id = "flux/latents/1 FluxPipeline"
    prompt_outputs = _EMBEDS
    prompt_width, pooled_width = "joint_attention_dim", "pooled_projection_dim"
    # CLIP, which gives one vector for the whole text, reads the first 77 tokens of its own.
    prompt_tokenizer = "tokenizer_2"
    # Those of diffusers' training script.
    default_target_modules: ClassVar[tuple[str, ...]] = (*shared.JOINT_PROJECTIONS, *shared.FLUX_FEED_FORWARD)
    target_sets: ClassVar[TargetSets] = {
        "attention": shared.JOINT_PROJECTIONS,
        "all": (*shared.JOINT_PROJECTIONS, *shared.FLUX_FEED_FORWARD, *SINGLE_STREAM, *_MODULATION),
    }

    keeps_padding: ClassVar[bool] = True

    @property
    def max_prompt_tokens(self) -> int:
        """512; with schnell 256. Each prompt is padded to that length, which the model sees.

        Source: the page of Flux in the documentation of diffusers.
        """
        return 256 if self._is_schnell else 512

    @property
    def distilled(self) -> str | None:
        """schnell: its transformer knows no guidance scale, and its sampler no shift. Better train dev."""
        if not self._is_schnell:
            return None
        return (
            "its transformer knows no guidance scale and its sampler no shift, as those of FLUX.1 schnell; "
            "better train FLUX.1 dev"
        )

    @property
    def _is_schnell(self) -> bool:
        """The sampler distinguishes it from a dev whose guidance was undone."""
        return not self.takes_guidance and not self.scheduler_config.get("use_dynamic_shifting")

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return super().model_inputs(conditioning, like) | {"guidance": self.guidance(conditioning, like)}

    @property
    def scale_argument(self) -> str:
        return "guidance_scale" if self.takes_guidance else "true_cfg_scale"

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        return super().call_arguments(pipeline, request) | {"max_sequence_length": self.max_prompt_tokens}


def tiny() -> FluxPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of each kind, of 32 channels; 16 latent channels at 1/8 size with the real model's statistics.
    """
    tokenizer, tokenizer_2 = tokenizers.clip_tokenizer(), tokenizers.t5_tokenizer()
    text_encoder, text_encoder_2 = text_encoders.tiny_clip_text(tokenizer), text_encoders.tiny_t5(tokenizer_2)
    with seeded(0):
        transformer = FluxTransformer2DModel(
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=text_encoder_2.config.d_model,
            pooled_projection_dim=text_encoder.config.hidden_size,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        )
    return FluxPipeline(
        # As in dev's repository: a shift that grows with the image, with the class's own range of it.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoders.tiny_flux_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        transformer=transformer,
    )
