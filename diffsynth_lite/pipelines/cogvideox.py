"""This file trains CogVideoX (text to video): 1.0 and 1.5.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``cogvideox_transformer_3d.py``, ``pipeline_cogvideox.py``, ``train_cogvideox_lora.py``
and, for the frames of 1.5, ``pipeline_cogvideox_image2video.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from transformers import T5EncoderModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward, unwrapped
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, under
from diffsynth_lite.lora.shared_names import EMBEDDER
from diffsynth_lite.lora.spelling import Spelling, converted_for_comfyui
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusion_family import DiffusionFamily
from diffsynth_lite.pipelines.base.family import TargetSets
from diffsynth_lite.pipelines.base.model_function import Checkpointing, checkpointed, model_function
from diffsynth_lite.releases.components import DIFFUSERS, T5_TOKENIZER_SLOW, T5_XXL
from diffsynth_lite.releases.release import Release, ReleaseComponent
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_PATCH = 2
_SPATIAL = 8
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")


@model_function
def model_fn_cogvideox(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of CogVideoX, each transformer block run by the gradient engine.

    Args:
        transformer: a ``CogVideoXTransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 16, F, H, W), noisy normalised latents, H and W even; F too with CogVideoX 1.5.
        timestep: (B,), whole, in [0, 1000).
        prompt_embeds_bld: (B, 226, D) prompt embeddings of T5, padded; there is no mask.

    Returns:
        (B, 16, F, H, W), the v that the transformer predicts.
    """
    with checkpointed(CogVideoX, transformer, gradient_checkpoint_forward, **checkpointing):
        predicted_bfchw: torch.Tensor = transformer(
            hidden_states=latents_bcfhw.transpose(1, 2),
            encoder_hidden_states=prompt_embeds_bld,
            timestep=timestep,
            image_rotary_emb=_rotary_positions(unwrapped(transformer), latents_bcfhw),
            return_dict=False,
        )[0]
    return predicted_bfchw.transpose(1, 2)


def _rotary_positions(
    transformer: Any, latents_bcfhw: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines of the places of all tokens; None of 2B, which adds places of its own."""
    if not transformer.config.use_rotary_positional_embeddings:
        return None
    num_frames, height, width = latents_bcfhw.shape[2:]
    pipeline = assemble(CogVideoXPipeline, transformer=transformer)
    positions: tuple[torch.Tensor, torch.Tensor] = pipeline._prepare_rotary_positional_embeddings(
        height * _SPATIAL, width * _SPATIAL, num_frames, latents_bcfhw.device
    )
    return positions


_SCRIPT = f"{DIFFUSERS}scripts/convert_cogvideox_to_diffusers.py"
_TRAINING = f"{DIFFUSERS}examples/cogvideo/train_cogvideox_lora.py"


def _scheduler(snr_shift_scale: float) -> ReleaseComponent:
    return ReleaseComponent(
        "CogVideoXDDIMScheduler",
        {
            "clip_sample": False,
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "snr_shift_scale": snr_shift_scale,
            "timestep_spacing": "trailing",
        },
        source=_SCRIPT,
    )


def _vae(**config: Any) -> ReleaseComponent:
    return ReleaseComponent(
        "AutoencoderKLCogVideoX", config, source=f"{_SCRIPT}: else the defaults of the class"
    )


_2B = Release(
    name="CogVideoX 2B",
    hub_id="THUDM/CogVideoX-2b",
    pipeline_class="CogVideoXPipeline",
    components={
        "transformer": ReleaseComponent(
            "CogVideoXTransformer3DModel",
            dtype="float16",
            source=f"{_SCRIPT}: the defaults of the class; dtype from {_TRAINING}",
        ),
        "text_encoder": replace(
            T5_XXL, dtype=None, num_bytes=None, source=f"google/t5-v1_1-xxl, as in {_SCRIPT}"
        ),
        "vae": _vae(scaling_factor=1.15258426),
    },
    scheduler=_scheduler(3.0),
    tokenizers={"tokenizer": T5_TOKENIZER_SLOW},
    size=(720, 480, 49),
    parameters=None,
    licence="Apache-2.0",
    gated=None,
    sources={
        "pipeline": _SCRIPT,
        "size": "THUDM/CogVideo, README.md",
        "parameters": "none but those rounded in their names",
        "licence": "from memory",
        "architecture": "no program is known to give it one",
    },
    unconfirmed=(
        "dtypes of text encoder and autoencoder",
        "timestep_spacing: linspace in other copies",
        "licence",
    ),
)
_5B = _2B.but(
    "CogVideoX 5B",
    "THUDM/CogVideoX-5b",
    transformer=ReleaseComponent(
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True},
        dtype="bfloat16",
        source=f"{_SCRIPT}; dtype from {_TRAINING}",
    ),
    vae=_vae(scaling_factor=0.7),
    scheduler=_scheduler(1.0),
    licence="CogVideoX License",
)
_1_5 = _5B.but(
    "CogVideoX 1.5 5B",
    "THUDM/CogVideoX1.5-5B",
    transformer=ReleaseComponent(
        "CogVideoXTransformer3DModel",
        {
            "num_attention_heads": 48,
            "num_layers": 42,
            "patch_bias": False,
            "patch_size_t": 2,
            "sample_frames": 81,
            "sample_height": 300,
            "sample_width": 300,
            "use_rotary_positional_embeddings": True,
        },
        source=_SCRIPT,
    ),
    vae=_vae(invert_scale_latents=True, scaling_factor=0.7),
    size=(1360, 768, 81),
    sources={"size": "the page of THUDM/CogVideo on DeepWiki, of its README.md"},
    unconfirmed=(*_5B.unconfirmed, "dtype of the transformer", "its sample_height and sample_width"),
)


_IN_COMFYUI = Spelling(
    prefixes={"transformer": "diffusion_model"},
    renames=(
        ("transformer_blocks", "blocks"),
        ("attn1.to_q", "q"),
        ("attn1.to_k", "k"),
        ("attn1.to_v", "v"),
        ("attn1.to_out.0", "attn_out"),
        ("ff.net.0.proj", "ff_proj"),
        ("ff.net.2", "ff_out"),
        ("time_embedding.linear_1", "time_embedding_linear_1"),
        ("time_embedding.linear_2", "time_embedding_linear_2"),
    ),
    unknown_to_comfyui=(),
)
"""The names of ComfyUI's own model, which diffusers' pipeline does not load.

Source: ComfyUI's ``comfy/ldm/cogvideo/model.py``.
"""
_LORA_LAYERS = LayerNames.spelled(
    _IN_COMFYUI,
    (
        *under("transformer_blocks.*.attn1", ("to_q", "to_k", "to_v", "to_out.0")),
        *under("transformer_blocks.*", ("ff.net.0.proj", "ff.net.2", "norm1.linear", "norm2.linear")),
        *under("time_embedding", EMBEDDER),
        *("patch_embed.proj", "patch_embed.text_proj", "norm_out.linear", "proj_out"),
    ),
)


class CogVideoX(DiffusionFamily):
    """CogVideoX 2B and 5B, and CogVideoX 1.5 5B, from text.

    30 blocks, or 42 in 5B, which see prompt and clip as one sequence; T5 prompts, padded to 226 tokens and
    not masked; 16 channels at 1/4 of the frames and 1/8 of the size. Denoising diffusion in 1000 timesteps,
    of which the last is pure noise; the transformer predicts v.

    The transformer of 1.5 takes latent frames in pairs, and clips have an odd number: the first one is
    repeated, as in image to video, and previews remove the copy. Its places come from a table, which ends at
    2400 pixels on each side.

    Its autoencoder decodes an even number of latent frames to more than it was given, so that clips have
    8 k + 1 frames. The models for image to video are not trained here.
    """

    pipelines = (CogVideoXPipeline,)
    releases = (_2B, _5B, _1_5)
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "cogvideox_lora.yaml"}
    transformer_class = CogVideoXTransformer3DModel
    lora_spelling = converted_for_comfyui(_IN_COMFYUI)
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": T5EncoderModel,
        "vae": AutoencoderKLCogVideoX,
    }
    block_lists = ("transformer_blocks",)
    unused_matmuls = ("ff.net.2",)
    record_kinds = ("video", "image")
    size_divisor = 16
    frame_step = 8
    max_prompt_tokens = 226
    keeps_padding = True
    model_fn = model_fn_cogvideox
    prompt_id = "cogvideox/prompt/1"
    prompt_outputs = ("prompt_embeds",)
    prompt_width = "text_embed_dim"
    # Those of diffusers' training script.
    default_target_modules = _ATTENTION
    target_sets: ClassVar[TargetSets] = {
        "attention": _ATTENTION,
        "all": (*_ATTENTION, *_FEED_FORWARD, "norm1.linear", "norm2.linear"),
    }

    @cached_property
    def _frames_of_a_token(self) -> int:
        return self.folder.component_config("transformer").get("patch_size_t") or 1

    @property
    def _is_1_5(self) -> bool:
        return self._frames_of_a_token > 1

    @property
    def default_num_frames(self) -> int:
        """49; 81 with 1.5."""
        return 81 if self._is_1_5 else 49

    @property
    def default_fps(self) -> float:
        """8; 16 with 1.5."""
        return 16.0 if self._is_1_5 else 8.0

    def check_size(self, width: int, height: int, *, keys: str) -> None:
        super().check_size(width, height, keys=keys)
        if not self._is_1_5:
            return
        config = self.folder.component_config("transformer")
        widest, highest = (config[f"sample_{side}"] * _SPATIAL for side in ("width", "height"))
        if width > widest or height > highest:
            raise UserError(
                f"{keys}: {width}x{height}; this model has position embeddings for clips of at most "
                f"{widest} x {highest} pixels"
            )

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return f"cogvideox/latents/1 {self.folder.fingerprint('vae')} {dtype} {self._frames_of_a_token}"

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        latents_bcfhw = super().encode_pixels(vae, pixels)
        first_bcfhw, lacking = latents_bcfhw[:, :, :1], self._frames_lacking(latents_bcfhw.shape[2])
        return torch.cat([*[first_bcfhw] * lacking, latents_bcfhw], dim=2)

    def _frames_lacking(self, num_latent_frames: int) -> int:
        """Those that fill the last token up."""
        return -num_latent_frames % self._frames_of_a_token

    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        channels, frames, *sides = super().latents_shape(width, height, num_frames)
        return channels, frames + self._frames_lacking(frames), *sides

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        _, num_frames, height, width = latents_shape
        return num_frames * height * width // (_PATCH**2 * self._frames_of_a_token)


def tiny() -> CogVideoXPipeline:
    """A random, complete and small pipeline of the real classes (5B), built offline in a second.

    Two blocks of 32 channels; 16 latent channels with the real model's scale.
    """
    tokenizer = tokenizers.t5_tokenizer()
    text_encoder = text_encoders.tiny_t5(tokenizer)
    return CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=autoencoders.tiny_cogvideox_vae(),
        transformer=tiny_cogvideox_transformer(text_encoder.config.d_model),
        # With the settings of the released ones. The ``step`` of this sampler, which authors advise for 5B,
        # takes other arguments than most.
        scheduler=CogVideoXDPMScheduler(
            prediction_type="v_prediction",
            clip_sample=False,
            snr_shift_scale=1.0,
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        ),
    )


def tiny_cogvideox_transformer(text_embed_dim: int, **settings: Any) -> CogVideoXTransformer3DModel:
    """A random transformer with two blocks."""
    with seeded(0):
        return CogVideoXTransformer3DModel(
            **{
                "num_layers": 2,
                "num_attention_heads": 2,
                "attention_head_dim": 16,
                "text_embed_dim": text_embed_dim,
                "time_embed_dim": 8,
                "sample_width": 16,
                "sample_height": 8,
                "use_rotary_positional_embeddings": True,
            }
            | settings
        )
