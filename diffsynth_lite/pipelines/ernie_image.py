"""This file trains ERNIE-Image (text to image): the base model and Turbo.

Layouts: b batch, c channels of a token (32 latent channels of 2 x 2 places), h and w height and width in
tokens; l tokens, d channels.
Sources: diffusers ``transformer_ernie_image.py`` and ``pipeline_ernie_image.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLFlux2,
    ErnieImagePipeline,
    ErnieImageTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from PIL.Image import Image
from transformers import Mistral3Model

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    checkpoint_blocks,
    gradient_checkpoint_forward,
    gradient_flags,
)
from diffsynth_lite.lora import known_names
from diffsynth_lite.lora.spelling import ERNIE_IMAGE_NAMES
from diffsynth_lite.media import Prompt
from diffsynth_lite.pipelines.base.batching import pad_tokens
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.latents import encode_patched_latents, scaled_latents_shape
from diffsynth_lite.releases.ernie_image import ERNIE_IMAGE
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.autoencoders import tiny_flux2_vae
from diffsynth_lite.testing.text_encoders import tiny_ministral3
from diffsynth_lite.testing.tokenizers import mistral_tokenizer

_PATCH = 2
_NUM_TIMESTEPS = 1000
# A literal in the pipeline, which the model was trained with; the autoencoder's file has 1e-4, of FLUX.2.
_NORM_EPS = 1e-5
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


def model_fn_ernie_image(
    transformer: torch.nn.Module,
    latents_bchw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    *,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
    policy: BlockPolicy | None = None,
) -> torch.Tensor:
    """One forward of ERNIE-Image, each transformer block run by the gradient engine.

    Args:
        transformer: an ``ErnieImageTransformer2DModel``, plain or wrapped by DDP.
        latents_bchw: (B, 128, H, W), noisy normalised latents, one place a token.
        timestep: (B,), in [0, 1000].
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded on the right.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding, which the transformer masks; None when no
            prompt is padded.
        use_gradient_checkpointing: recompute each block in backward.
        use_gradient_checkpointing_offload: also offload each block's inputs to host memory.
        policy: which blocks the two switches are for; None is the policy of the gradient engine in scope.

    Returns:
        (B, 128, H, W), the predicted velocity ``noise - latents``.
    """
    switches = use_gradient_checkpointing, use_gradient_checkpointing_offload
    if prompt_embeds_mask is None:
        prompt_embeds_mask = prompt_embeds_bld.new_ones(prompt_embeds_bld.shape[:2], dtype=torch.long)
    with checkpoint_blocks(
        transformer,
        ErnieImage.block_lists,
        gradient_checkpoint_forward,
        *switches,
        policy=policy,
        unused_matmuls=ErnieImage.unused_matmuls,
    ):
        velocity_bchw: torch.Tensor = transformer(
            hidden_states=latents_bchw,
            timestep=timestep,
            text_bth=prompt_embeds_bld,
            text_lens=prompt_embeds_mask.sum(dim=1),
            return_dict=False,
        )[0]
    return velocity_bchw


class ErnieImage(DiffusersFamily):
    """ERNIE-Image and ERNIE-Image-Turbo, from text.

    36 single-stream blocks, prompts of Ministral 3, the autoencoder of FLUX.2: 32 channels at 1/8 size, four
    places of which are a token. Captions of any lengths may stand in one batch. No layer of the last block is
    unused: text and picture share its weights.

    The pipeline has a second language model, which makes short prompts longer (``pe``). Its weights are
    neither downloaded nor used here: captions are learned, and previews drawn, as they are written. To draw
    with a LoRA as in the previews, give the pipeline ``use_pe=False``.

    The pipeline cuts prompts where its tokenizer says, if it says so at all; here they are cut at 512 tokens,
    as by OneTrainer.

    Turbo is distilled to 8 steps without guidance. No setting is known to tell so; its name does.

    The sampler's shift is 4 at any size; DiffSynth-Studio trains with 3 (``set_timesteps_ernie_image``), as
    do the recipe here and ai-toolkit.
    """

    pipelines = (ErnieImagePipeline,)
    releases = ERNIE_IMAGE
    transformer_class = ErnieImageTransformer2DModel
    lora_spelling = ERNIE_IMAGE_NAMES
    lora_layers = known_names.ERNIE_IMAGE
    encoder_classes: ClassVar[Mapping[str, Any]] = {"text_encoder": Mistral3Model, "vae": AutoencoderKLFlux2}
    block_lists = ("layers",)
    unused_matmuls = ("mlp.linear_fc2",)
    size_divisor = 16
    max_prompt_tokens = 512
    default_target_modules = (*_ATTENTION, "gate_proj", "up_proj", "linear_fc2")
    target_sets: ClassVar[TargetSets] = {"attention": _ATTENTION, "all": default_target_modules}

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("text_encoder", "tokenizer")
        return f"ernie_image/prompt/1 {parts} {dtype} {self.max_prompt_tokens}"

    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        pipeline = self.prompt_pipeline(dtype, device)
        # The pipeline has no argument for it.
        pipeline.tokenizer.model_max_length = self.max_prompt_tokens

        @torch.no_grad()
        def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
            rows_ld = pipeline.encode_prompt([prompt.text for prompt in prompts], device)
            return [{"prompt_embeds": row_ld.cpu()} for row_ld in rows_ld]

        return encode

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return f"ernie_image/latents/1 {self.folder.fingerprint('vae')} {dtype}"

    def encode_pixels(self, vae: Any, pixels_bchw: torch.Tensor) -> torch.Tensor:
        return encode_patched_latents(vae, pixels_bchw, eps=_NORM_EPS)

    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        channels, *sides = scaled_latents_shape(self.folder.component_config("vae"), width, height)
        return channels * _PATCH**2, *(side // _PATCH for side in sides)

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        return latents_shape[-2] * latents_shape[-1]

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        width = self.folder.component_config("transformer")["text_in_dim"]
        return {"prompt_embeds": torch.ones(self.max_prompt_tokens, width)}

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        like = device_and_dtype(transformer)
        embeds_bld, mask = pad_tokens([sample["prompt_embeds"] for sample in conditioning], **like)
        return model_fn_ernie_image(
            transformer,
            noisy_latents.to(**like),
            sigma * _NUM_TIMESTEPS,
            embeds_bld,
            mask,
            **gradient_flags(),
        )

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        return {"use_pe": False}

    def draw(self, pipeline: Any, request: PreviewRequest) -> list[Image]:
        like = device_and_dtype(pipeline.transformer)
        images: list[Image] = pipeline(
            prompt_embeds=[request.conditioning["prompt_embeds"].to(**like)],
            negative_prompt_embeds=[request.negative["prompt_embeds"].to(**like)],
            guidance_scale=request.guidance_scale,
            **request.call_arguments(),
        ).images
        return images


def tiny() -> ErnieImagePipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels; 32 latent channels at 1/8 size.
    """
    tokenizer = mistral_tokenizer()
    text_encoder = tiny_ministral3(tokenizer)
    with seeded(0):
        transformer = ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=64,
            text_in_dim=text_encoder.config.text_config.hidden_size,
            rope_axes_dim=(4, 6, 6),
        )
        # The class starts them at zero, where a wrong use of them would not show.
        for layer in (transformer.adaLN_modulation[-1], transformer.final_linear):
            layer.reset_parameters()
    return ErnieImagePipeline(
        # As in the base model's repository: a fixed shift.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        vae=tiny_flux2_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
