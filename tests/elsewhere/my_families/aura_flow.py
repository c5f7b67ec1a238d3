"""This file trains AuraFlow (text to image) from outside of diffsynth_lite: ``my_families.aura_flow``.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``auraflow_transformer_2d.py`` and ``pipeline_aura_flow.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import UMT5EncoderModel

from diffsynth_lite.core.gradient import checkpoint_blocks, gradient_checkpoint_forward
from diffsynth_lite.media import RecordKind
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily
from diffsynth_lite.pipelines.base.model_function import stacked
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.autoencoders import tiny_kl
from diffsynth_lite.testing.text_encoders import tiny_umt5
from diffsynth_lite.testing.tokenizers import t5_tokenizer

BLOCK_LISTS = ("joint_transformer_blocks", "single_transformer_blocks")


def model_fn_aura_flow(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    *,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
) -> torch.Tensor:
    """The predicted velocity ``noise - latents``; ``timestep`` is the noise level, in [0, 1]."""
    switches = use_gradient_checkpointing, use_gradient_checkpointing_offload
    with checkpoint_blocks(transformer, BLOCK_LISTS, gradient_checkpoint_forward, *switches):
        velocity_bchw: torch.Tensor = transformer(
            hidden_states=latents_bchw,
            encoder_hidden_states=prompt_embeds_bld,
            timestep=timestep,
            return_dict=False,
        )[0]
    return velocity_bchw


class AuraFlow(DiffusersFamily):
    """AuraFlow: 4 dual-stream and 32 single-stream blocks, prompts of T5, 4 channels at 1/8 size."""

    pipelines = (AuraFlowPipeline,)
    transformer_class = AuraFlowTransformer2DModel
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": UMT5EncoderModel, "vae": AutoencoderKL}
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "aura_flow_lora.yaml"}
    block_lists = BLOCK_LISTS
    size_divisor = 16
    max_prompt_tokens = 256
    patch = 2
    model_fn = model_fn_aura_flow
    prompt_id = "aura_flow/prompt/1"
    prompt_outputs = ("prompt_embeds",)
    latents_id = "aura_flow/latents/1"
    prompt_width = "joint_attention_dim"
    default_target_modules = ("to_q", "to_k", "to_v", "to_out.0")

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        # All rows: those of the padding are zeros, and the model sees them.
        return {"prompt_embeds_bld": stacked(conditioning, "prompt_embeds", like)}

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        embeds_bld = prompt["prompt_embeds"][None].to(**like)
        # The pipeline asks for a mask that it does not use.
        return {"prompt_embeds": embeds_bld, "prompt_attention_mask": torch.ones_like(embeds_bld)}


def tiny() -> AuraFlowPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second."""
    tokenizer = t5_tokenizer()
    text_encoder = tiny_umt5(tokenizer)
    with seeded(0):
        transformer = AuraFlowTransformer2DModel(
            num_mmdit_layers=2,
            num_single_dit_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=text_encoder.config.d_model,
            caption_projection_dim=32,
            pos_embed_max_size=64,
        )
    return AuraFlowPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=tiny_kl(latent_channels=4, scaling_factor=0.13025),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
