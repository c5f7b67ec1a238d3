"""This file trains Stable Diffusion 1.5 from outside of diffsynth_lite: ``my_families.stable_diffusion``.

Layouts: b batch, c latent channels, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``unet_2d_condition.py`` and ``pipeline_stable_diffusion.py``.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel

from diffsynth_lite.core.gradient import checkpoint_blocks, gradient_checkpoint_forward, unwrapped
from diffsynth_lite.media import Prompt, RecordKind
from diffsynth_lite.pipelines import Conditioning
from diffsynth_lite.pipelines.base.diffusion_family import DiffusionFamily
from diffsynth_lite.pipelines.base.model_function import stacked
from diffsynth_lite.pipelines.sdxl.family import unet_block_lists
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.autoencoders import tiny_kl
from diffsynth_lite.testing.text_encoders import tiny_clip_text
from diffsynth_lite.testing.tokenizers import clip_tokenizer


def model_fn_stable_diffusion(
    unet: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    *,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
) -> torch.Tensor:
    """The noise that the UNet predicts; ``timestep`` is whole, in [0, 1000)."""
    switches = use_gradient_checkpointing, use_gradient_checkpointing_offload
    block_lists = tuple(unet_block_lists(unwrapped(unet).config))
    with checkpoint_blocks(unet, block_lists, gradient_checkpoint_forward, *switches):
        predicted_bchw: torch.Tensor = unet(
            latents_bchw, timestep, encoder_hidden_states=prompt_embeds_bld, return_dict=False
        )[0]
    return predicted_bchw


class StableDiffusion(DiffusionFamily):
    """Stable Diffusion 1.5: a UNet, prompts of CLIP, 4 channels at 1/8 size."""

    pipelines = (StableDiffusionPipeline,)
    pipeline_settings: ClassVar[Mapping[str, Any]] = {"requires_safety_checker": False}
    transformer_class = UNet2DConditionModel
    trainable = ("unet",)
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": CLIPTextModel, "vae": AutoencoderKL}
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"image": "stable_diffusion_lora.yaml"}
    max_prompt_tokens = 77
    keeps_padding = True
    model_fn = model_fn_stable_diffusion
    prompt_id = "stable_diffusion/prompt/1"
    latents_id = "stable_diffusion/latents/1"
    default_target_modules = ("to_q", "to_k", "to_v", "to_out.0")

    @property
    def block_lists(self) -> tuple[str, ...]:
        return tuple(unet_block_lists(self.folder.component_config("unet")))

    @property
    def size_divisor(self) -> int:
        """64: each level of the UNet and of the autoencoder but the last halves the image."""
        levels = [self.folder.component_config(name)["block_out_channels"] for name in ("unet", "vae")]
        return int(2 ** sum(len(channels) - 1 for channels in levels))

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        embeds_bld, _ = pipeline.encode_prompt([prompt.text for prompt in prompts], device, 1, False)
        return [{"prompt_embeds": embeds_ld.cpu().clone()} for embeds_ld in embeds_bld]

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        # All 77 rows: nothing is masked.
        return {"prompt_embeds_bld": stacked(conditioning, "prompt_embeds", like)}

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        width = self.folder.component_config("unet")["cross_attention_dim"]
        return {"prompt_embeds": torch.ones(self.max_prompt_tokens, width)}


def tiny() -> StableDiffusionPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second."""
    tokenizer = clip_tokenizer()
    text_encoder = tiny_clip_text(tokenizer)
    with seeded(0):
        unet = UNet2DConditionModel(
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            attention_head_dim=2,
            cross_attention_dim=text_encoder.config.hidden_size,
            norm_num_groups=4,
        ).eval()
    return StableDiffusionPipeline(
        scheduler=DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        ),
        vae=tiny_kl(latent_channels=4, scaling_factor=0.18215),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
