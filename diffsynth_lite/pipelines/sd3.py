"""This file trains Stable Diffusion 3 and 3.5 (text to image).

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_sd3.py``, ``pipeline_stable_diffusion_3.py`` and
``train_dreambooth_lora_sd3.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.lora import shared_names as shared
from diffsynth_lite.lora.layer_names import (
    LayerNames,
    LoraLayers,
    Original,
    fused,
    renamed,
    renamed_in,
    under,
)
from diffsynth_lite.lora.spelling import taken_by_comfyui
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.family import Conditioning, TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.releases import components as known
from diffsynth_lite.releases.release import Release, ReleaseComponent
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
_CLIP_TOKENS = 77
"""Rows that CLIP gives of any prompt, in front of those of T5."""


@model_function
def model_fn_sd3(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    pooled_prompt_embeds_bd: torch.Tensor,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of Stable Diffusion 3, each transformer block run by the gradient engine.

    Args:
        transformer: an ``SD3Transformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 16, H, W), noisy normalised latents, H and W even.
        timestep: (B,), in [0, 1000].
        prompt_embeds_bld: (B, 77 + 256, D), prompt embeddings of both CLIPs, side by side, and after them
            those of T5.
        pooled_prompt_embeds_bd: (B, D_pooled), one vector of each CLIP, side by side.

    Returns:
        (B, 16, H, W), the predicted velocity ``noise - latents``.
    """
    with checkpointed(SD3, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bchw: torch.Tensor = transformer(
            hidden_states=latents_bchw,
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            pooled_projections=pooled_prompt_embeds_bd,
            return_dict=False,
        )[0]
    return velocity_bchw


_FOLDER = f"{known.FORGE}stabilityai/stable-diffusion-3-medium-diffusers"
_PORT = "qds, a public port to MLX, which reads the files of the three repositories of 3.5"
_SCRIPT = f"{known.DIFFUSERS}scripts/convert_sd3_to_diffusers.py"


def _transformer(source: str, **config: Any) -> ReleaseComponent:
    shared = {"joint_attention_dim": 4096, "pooled_projection_dim": 2048}
    return ReleaseComponent("SD3Transformer2DModel", shared | config, source=source)


_OF_MEDIUM = {"caption_projection_dim": 1536, "num_attention_heads": 24, "num_layers": 24}
_MEDIUM_3 = Release(
    name="Stable Diffusion 3 medium",
    hub_id="stabilityai/stable-diffusion-3-medium-diffusers",
    pipeline_class="StableDiffusion3Pipeline",
    components={
        "transformer": _transformer(f"{_FOLDER}/transformer", **_OF_MEDIUM, pos_embed_max_size=192),
        "text_encoder": replace(
            known.CLIP_L,
            class_name="CLIPTextModelWithProjection",
            dtype=None,
            source=f"{_FOLDER}/text_encoder",
        ),
        "text_encoder_2": known.CLIP_G,
        "text_encoder_3": replace(
            known.T5_XXL, dtype="float16", source=f"{_FOLDER}/text_encoder_3, with its index"
        ),
        "vae": replace(
            known.FLUX_VAE,
            config={**known.FLUX_VAE.config, "scaling_factor": 1.5305, "shift_factor": 0.0609},
            dtype=None,
            source=f"{_FOLDER}/vae",
        ),
    },
    scheduler=known.flow_euler(3.0, f"{_FOLDER}/scheduler"),
    tokenizers={
        "tokenizer": known.CLIP_TOKENIZER,
        "tokenizer_2": known.CLIP_TOKENIZER,
        "tokenizer_3": known.T5_TOKENIZER_BOTH,
    },
    size=(1024, 1024, 1),
    parameters=2e9,
    licence="Stability AI Community License",
    gated=True,
    architecture="stable-diffusion-3-medium",
    version="medium",
    sources={
        "pipeline": f"{_FOLDER}/model_index.json",
        "size": "`sample_size` of the transformer",
        "parameters": "2B in its files' names elsewhere, as sd_3_2b of OneTrainer",
        "licence": f"{_PORT}; gated: the page of SD3 in the documentation of diffusers",
        "architecture": f"{known.SD_SCRIPTS}sai_model_spec.py, sd3_utils.py; sd3_train_network.py",
    },
    unconfirmed=("dtype of the transformer, CLIP and autoencoder", "licence"),
)


def _of_3_5(name: str, parameters: float, transformer: ReleaseComponent) -> Release:
    size = "medium" if name == "medium" else "large"
    return _MEDIUM_3.but(
        f"Stable Diffusion 3.5 {name}",
        f"stabilityai/stable-diffusion-3.5-{name.replace(' ', '-')}",
        transformer=transformer,
        parameters=parameters,
        architecture=f"stable-diffusion-3-5-{size}",
        version=f"5-{size}",
        sources={
            "pipeline": f"that of 3 medium: {_FOLDER}/model_index.json; other settings: {_PORT}",
            "parameters": _PORT,
            "licence": _PORT,
        },
        unconfirmed=("dtype of the transformer, CLIP and autoencoder", "files of the tokenizers"),
    )


_MEDIUM = _of_3_5(
    "medium",
    2.5e9,
    _transformer(
        f"{_PORT}; {_SCRIPT}",
        **_OF_MEDIUM,
        dual_attention_layers=tuple(range(13)),
        pos_embed_max_size=384,
        qk_norm="rms_norm",
    ),
)
_LARGE = _of_3_5(
    "large",
    8.1e9,
    _transformer(
        f"{_PORT}; {_SCRIPT}",
        caption_projection_dim=2432,
        num_attention_heads=38,
        num_layers=38,
        pos_embed_max_size=192,
        qk_norm="rms_norm",
    ),
)
_LARGE_TURBO = _LARGE.but(
    "Stable Diffusion 3.5 large turbo",
    "stabilityai/stable-diffusion-3.5-large-turbo",
    distilled="4 steps without guidance",
)


_LORA_LAYERS = LayerNames(
    layers=(
        *under(
            shared.DOUBLE,
            (*shared.JOINT_ATTENTION, *shared.FLUX_FEED_FORWARD, "norm1.linear", "norm1_context.linear"),
        ),
        *under(f"{shared.DOUBLE}.attn2", (*shared.QKV, "to_out.0")),
        *under("time_text_embed.timestep_embedder", shared.EMBEDDER),
        *under("time_text_embed.text_embedder", shared.EMBEDDER),
        *("pos_embed.proj", "context_embedder", "norm_out.linear", "proj_out"),
    ),
    kohya={
        "joint_blocks.*.x_block.attn.qkv": fused(*under(f"{shared.DOUBLE}.attn", shared.QKV)),
        "joint_blocks.*.x_block.attn2.qkv": fused(*under(f"{shared.DOUBLE}.attn2", shared.QKV)),
        "joint_blocks.*.context_block.attn.qkv": fused(*under(f"{shared.DOUBLE}.attn", shared.ADDED_QKV)),
        **renamed_in(
            {"joint_blocks.*.x_block": shared.DOUBLE},
            {
                "attn.proj": "attn.to_out.0",
                "attn2.proj": "attn2.to_out.0",
                "mlp.fc1": "ff.net.0.proj",
                "mlp.fc2": "ff.net.2",
                "adaLN_modulation.1": "norm1.linear",
            },
        ),
        **renamed_in(
            {"joint_blocks.*.context_block": shared.DOUBLE},
            {
                "attn.proj": "attn.to_add_out",
                "mlp.fc1": "ff_context.net.0.proj",
                "mlp.fc2": "ff_context.net.2",
            },
        ),
        # Of the last block it has scale and shift only.
        "joint_blocks.*.context_block.adaLN_modulation.1": Original(
            (f"{shared.DOUBLE}.norm1_context.linear",), halves_swapped=True
        ),
        **renamed_in(
            {
                "t_embedder.mlp": "time_text_embed.timestep_embedder",
                "y_embedder.mlp": "time_text_embed.text_embedder",
            },
            {"0": "linear_1", "2": "linear_2"},
        ),
        "x_embedder.proj": renamed("pos_embed.proj"),
        "final_layer.linear": renamed("proj_out"),
        "final_layer.adaLN_modulation.1": shared.LAST_NORM,
    },
)


class SD3(DiffusersFamily):
    """Stable Diffusion 3 medium and 3.5 (medium, large and large turbo), from text.

    24 dual-stream blocks, in 3.5 large 38; the first 13 of 3.5 medium have a second attention over the image
    only. Prompts of two CLIPs and T5, 16 channels at 1/8 size. All three text encoders must be in the folder.

    CLIP reads the first 77 of its tokens, T5 the first 256, padding included, and the model sees all of them:
    nothing is masked. A caption of more than 77 tokens is cut for CLIP only.

    The blocks' places come from a table: images may have at most 3072 pixels on each side, and with 3.5
    medium 6144.

    Large turbo is distilled to 4 steps without guidance. No setting shows it; it is recognised by its name.

    The sampler's shift is 3 at any size. diffusers' training script takes it, too, with a density around the
    middle; kohya's sd-scripts and diffusion-pipe shift nothing by default. diffusers' script also weighs:
    its ``precondition_outputs``, on by default, compares ``noisy - sigma * velocity`` with the data, which is
    the loss of the velocity times sigma squared. Here all noise levels weigh the same, unless
    ``objective.loss_weighting`` is set.
    """

    pipelines = (StableDiffusion3Pipeline,)
    releases = (_MEDIUM, _LARGE, _LARGE_TURBO, _MEDIUM_3)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "sd35_medium_lora.yaml"}
    transformer_class = SD3Transformer2DModel
    lora_spelling = taken_by_comfyui()
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
        "text_encoder_3": T5EncoderModel,
        "vae": AutoencoderKL,
    }
    tokenizers = ("tokenizer", "tokenizer_2", "tokenizer_3")
    prompt_tokenizer = "tokenizer_3"
    block_lists = ("transformer_blocks",)
    unused_matmuls = ("ff.net.2", "ff_context.net.2")
    size_divisor = 16
    max_prompt_tokens = 256
    keeps_padding = True
    num_other_rows = _CLIP_TOKENS
    patch = _PATCH
    model_fn = model_fn_sd3
    num_timesteps = 1000
    # Nothing is masked, so the padding's rows hold something too, and the model sees them.
    prompt_outputs = ("prompt_embeds", "", "pooled_prompt_embeds")
    prompt_width, pooled_width = "joint_attention_dim", "pooled_projection_dim"
    prompt_id = "sd3/prompt/1"
    latents_id = "sd3/latents/1"
    # Those of diffusers' training script, and of the second attention in 3.5 medium.
    default_target_modules = shared.JOINT_PROJECTIONS
    target_sets: ClassVar[TargetSets] = {
        "attention": shared.JOINT_PROJECTIONS,
        "all": (*shared.JOINT_PROJECTIONS, *shared.FLUX_FEED_FORWARD, "norm1.linear", "norm1_context.linear"),
    }
    unused_in_last_block = ("attn.add_q_proj",)

    @property
    def max_side(self) -> int:
        return int(self.folder.component_config("transformer")["pos_embed_max_size"]) * self.size_divisor

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        given = super().example_conditioning(latents_shape) or {}
        of_clip = given["prompt_embeds"].new_ones(_CLIP_TOKENS, given["prompt_embeds"].shape[1])
        return {**given, "prompt_embeds": torch.cat([of_clip, given["prompt_embeds"]])}


def tiny() -> StableDiffusion3Pipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels, the first with a second attention as in 3.5 medium; 16 latent channels at 1/8
    size with the real model's statistics.
    """
    clip, second_clip, t5 = (
        tokenizers.clip_tokenizer(),
        tokenizers.clip_tokenizer(pad_token="!"),
        tokenizers.t5_tokenizer(),
    )
    of_clip = [
        text_encoders.tiny_clip_text_with_projection(clip),
        text_encoders.tiny_clip_text_with_projection(second_clip, seed=1),
    ]
    # Wider than both CLIPs, as the real one is: what CLIP gives is filled up.
    text_encoder_3 = text_encoders.tiny_t5(t5, hidden_size=80)
    with seeded(0):
        transformer = SD3Transformer2DModel(
            sample_size=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=text_encoder_3.config.d_model,
            caption_projection_dim=32,
            pooled_projection_dim=sum(encoder.config.projection_dim for encoder in of_clip),
            pos_embed_max_size=24,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        # As in all released repositories: a fixed shift.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoders.tiny_kl(
            latent_channels=16,
            shift_factor=0.0609,
            scaling_factor=1.5305,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=of_clip[0],
        tokenizer=clip,
        text_encoder_2=of_clip[1],
        tokenizer_2=second_clip,
        text_encoder_3=text_encoder_3,
        tokenizer_3=t5,
    )
