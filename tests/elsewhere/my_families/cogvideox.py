"""This file trains CogVideoX (text to video) from outside of diffsynth_lite: ``my_families.cogvideox``.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``cogvideox_transformer_3d.py`` and ``pipeline_cogvideox.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDPMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from PIL.Image import Image
from transformers import T5EncoderModel

from diffsynth_lite.core.gradient import checkpoint_blocks, gradient_checkpoint_forward, gradient_flags
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines import Conditioning, PreviewRequest
from diffsynth_lite.pipelines.base.diffusers_family import assemble, device_and_dtype
from diffsynth_lite.pipelines.base.diffusion_family import DiffusionFamily
from diffsynth_lite.pipelines.base.family import EncodedMedia
from diffsynth_lite.pipelines.base.latents import encode_scaled_latents
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.text_encoders import tiny_t5
from diffsynth_lite.testing.tokenizers import t5_tokenizer

BLOCK_LISTS = ("transformer_blocks",)


def model_fn_cogvideox(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    *,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
) -> torch.Tensor:
    """What the model predicts, in the shape of the latents; ``timestep`` is whole, in [0, 1000)."""
    switches = use_gradient_checkpointing, use_gradient_checkpointing_offload
    with checkpoint_blocks(transformer, BLOCK_LISTS, gradient_checkpoint_forward, *switches):
        predicted_bfchw: torch.Tensor = transformer(
            hidden_states=latents_bcfhw.transpose(1, 2),
            encoder_hidden_states=prompt_embeds_bld,
            timestep=timestep,
            return_dict=False,
        )[0]
    return predicted_bfchw.transpose(1, 2)


class CogVideoX(DiffusionFamily):
    """CogVideoX 2B: 30 blocks, T5 prompts, 16 channels at 1/4 of the frames and 1/8 of the size.

    The larger models have rotary positions, which this file does not give them; they are refused.
    """

    pipelines = (CogVideoXPipeline,)
    transformer_class = CogVideoXTransformer3DModel
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": T5EncoderModel,
        "vae": AutoencoderKLCogVideoX,
    }
    block_lists = BLOCK_LISTS
    record_kinds = ("video",)
    size_divisor = 16
    frame_step = 4
    default_num_frames = 49
    default_fps = 8.0
    max_prompt_tokens = 226
    default_target_modules = ("to_q", "to_k", "to_v", "to_out.0")

    def check_folder(self, *, with_weights: bool = True) -> None:
        super().check_folder(with_weights=with_weights)
        if self.folder.component_config("transformer").get("use_rotary_positional_embeddings"):
            raise UserError(
                f"model.path: {self.folder.path} holds a CogVideoX with rotary positions "
                "(use_rotary_positional_embeddings), which is not supported; use CogVideoX 2B"
            )

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("text_encoder", "tokenizer")
        return f"cogvideox/prompt/1 {parts} {dtype} {self.max_prompt_tokens}"

    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        pipeline = self.prompt_pipeline(dtype, device)

        @torch.no_grad()
        def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
            embeds_bld, _ = pipeline.encode_prompt(
                [prompt.text for prompt in prompts],
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_prompt_tokens,
                device=device,
            )
            # All rows: there is no mask, so that the model sees the padding too.
            return [{"prompt_embeds": row_ld.cpu().clone()} for row_ld in embeds_bld]

        return encode

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return f"cogvideox/latents/1 {self.folder.fingerprint('vae')} {dtype}"

    def load_media_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Media]], list[EncodedMedia]]:
        pipeline = assemble(CogVideoXPipeline, vae=self.load_component("vae", dtype).to(device))

        def encode(media: Sequence[Media]) -> list[EncodedMedia]:
            pixels_bcfhw = pipeline.video_processor.preprocess_video([list(item.frames) for item in media])
            return [{"latents": latents} for latents in encode_scaled_latents(pipeline.vae, pixels_bcfhw)]

        return encode

    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        channels = self.folder.component_config("vae")["latent_channels"]
        return channels, (num_frames - 1) // self.frame_step + 1, height // 8, width // 8

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        _, num_frames, height, width = latents_shape
        return num_frames * height * width // 4

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        like = device_and_dtype(transformer)
        return model_fn_cogvideox(
            transformer,
            noisy_latents.to(**like),
            self.noise_path.timestep(sigma),
            torch.stack([sample["prompt_embeds"] for sample in conditioning]).to(**like),
            **gradient_flags(),
        )

    def draw(self, pipeline: Any, request: PreviewRequest) -> list[Image]:
        like = device_and_dtype(pipeline.transformer)
        prompts = {"prompt_embeds": request.conditioning, "negative_prompt_embeds": request.negative}
        frames: list[Image] = pipeline(
            **{name: prompt["prompt_embeds"][None].to(**like) for name, prompt in prompts.items()},
            guidance_scale=request.guidance_scale,
            num_frames=request.num_frames,
            **request.call_arguments(),
        ).frames[0]
        return frames


def tiny() -> CogVideoXPipeline:
    """A random, complete and small pipeline; its sampler's ``step`` takes other arguments than most."""
    tokenizer = t5_tokenizer()
    text_encoder = tiny_t5(tokenizer)
    with seeded(0):
        transformer = CogVideoXTransformer3DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            text_embed_dim=text_encoder.config.d_model,
            time_embed_dim=8,
        )
        vae = AutoencoderKLCogVideoX(block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2)
    return CogVideoXPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=vae.eval(),
        transformer=transformer,
        scheduler=CogVideoXDPMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
        ),
    )
