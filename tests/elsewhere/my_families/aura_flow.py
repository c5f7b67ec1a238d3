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
from PIL.Image import Image
from transformers import UMT5EncoderModel

from diffsynth_lite.core.gradient import checkpoint_blocks, gradient_checkpoint_forward, gradient_flags
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines import Conditioning, PreviewRequest
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, device_and_dtype
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
    prompt_id = "aura_flow/prompt/1"
    latents_id = "aura_flow/latents/1"
    prompt_width = "joint_attention_dim"
    default_target_modules = ("to_q", "to_k", "to_v", "to_out.0")

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        embeds_bld, *_ = pipeline.encode_prompt(
            [prompt.text for prompt in prompts],
            do_classifier_free_guidance=False,
            device=device,
            max_sequence_length=self.max_prompt_tokens,
        )
        # All rows: those of the padding are zeros, and the model sees them.
        return [{"prompt_embeds": row.cpu().clone()} for row in embeds_bld]

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        like = device_and_dtype(transformer)
        return model_fn_aura_flow(
            transformer,
            noisy_latents.to(**like),
            sigma,
            torch.stack([sample["prompt_embeds"] for sample in conditioning]).to(**like),
            **gradient_flags(),
        )

    def generate(self, pipeline: Any, request: PreviewRequest) -> list[Image]:
        like = device_and_dtype(pipeline.transformer)
        prompts = {"prompt": request.conditioning, "negative_prompt": request.negative}
        arguments: dict[str, torch.Tensor] = {}
        for name, conditioning in prompts.items():
            embeds_bld = conditioning["prompt_embeds"][None].to(**like)
            # The pipeline asks for a mask that it does not use.
            arguments |= {f"{name}_embeds": embeds_bld, f"{name}_attention_mask": torch.ones_like(embeds_bld)}
        pictures: list[Image] = pipeline(
            **arguments,
            guidance_scale=request.guidance_scale,
            **request.call_arguments(),
        ).images
        return pictures


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
