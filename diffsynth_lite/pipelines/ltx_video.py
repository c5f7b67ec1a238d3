"""This file trains LTX-Video: clips from text, and from text with their first frame.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_ltx.py``, ``pipeline_ltx.py`` and ``pipeline_ltx_image2video.py``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from PIL.Image import Image
from transformers import T5EncoderModel

from diffsynth_lite.core.gradient import (
    BlockPolicy,
    checkpoint_blocks,
    gradient_checkpoint_forward,
    gradient_flags,
)
from diffsynth_lite.media import Media, Prompt
from diffsynth_lite.pipelines.base.batching import pad_tokens, without_padding
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, assemble, device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.first_frame import encode_clips, preview_start, with_first_frames
from diffsynth_lite.releases.ltx_video import LTX_VIDEO
from diffsynth_lite.testing import seeded
from diffsynth_lite.testing.autoencoders import tiny_ltx_vae
from diffsynth_lite.testing.text_encoders import tiny_t5
from diffsynth_lite.testing.tokenizers import t5_tokenizer

_SPATIAL = 32
_TEMPORAL = 8
_NUM_TIMESTEPS = 1000
_DECODE_TIMESTEP = 0.05
_DECODE_NOISE = 0.025
"""What diffusers' page on LTX-Video advises for autoencoders that remove noise while they decode (0.9.1)."""


def model_fn_ltx_video(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    *,
    frame_rate: torch.Tensor,
    use_gradient_checkpointing: bool = False,
    use_gradient_checkpointing_offload: bool = False,
    policy: BlockPolicy | None = None,
) -> torch.Tensor:
    """One forward of LTX-Video, each transformer block run by the gradient engine.

    Args:
        transformer: a ``LTXVideoTransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 128, F, H, W), noisy normalised latents.
        timestep: (B,), or (B, F * H * W) with one for each token, in [0, 1000].
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded on the right.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.
        frame_rate: (B,), frames per second of the clips: positions in time are in seconds.
        use_gradient_checkpointing: recompute each block in backward.
        use_gradient_checkpointing_offload: also offload each block's inputs to host memory.
        policy: which blocks the two switches are for; None is the policy of the gradient engine in scope.

    Returns:
        (B, 128, F, H, W), the predicted velocity ``noise - latents``.
    """
    num_frames, height, width = latents_bcfhw.shape[2:]
    switches = use_gradient_checkpointing, use_gradient_checkpointing_offload
    with checkpoint_blocks(
        transformer,
        LTXVideo.block_lists,
        gradient_checkpoint_forward,
        *switches,
        policy=policy,
        unused_matmuls=LTXVideo.unused_matmuls,
    ):
        velocity_bld = transformer(
            hidden_states=LTXPipeline._pack_latents(latents_bcfhw),
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_attention_mask=prompt_embeds_mask,
            num_frames=num_frames,
            height=height,
            width=width,
            # Axes as diffusers multiplies them: (B, 1, F, H, W).
            rope_interpolation_scale=(_TEMPORAL / frame_rate.view(-1, 1, 1, 1, 1), _SPATIAL, _SPATIAL),
            return_dict=False,
        )[0]
    velocity_bcfhw: torch.Tensor = LTXPipeline._unpack_latents(velocity_bld, num_frames, height, width)
    return velocity_bcfhw


class LTXVideo(DiffusersFamily):
    """LTX-Video 0.9 and 0.9.1, from text, and from text with a first frame.

    28 blocks, T5 prompts, a causal VAE of 128 channels: 1/8 of the frames, 1/32 of the size. Folders of
    ``LTXConditionPipeline`` (0.9.5 and later) are refused: other positions in time. These are in seconds, so
    that each clip trains at its own frame rate, and previews are drawn at 25 frames a second.

    A clip with a first frame is trained as ``LTXImageToVideoPipeline`` samples it: the first latent frame is
    that of the picture, without noise and at timestep 0, and does not count in the loss. It takes clips of 9
    frames or more; a last frame is an error.
    """

    pipelines = (LTXPipeline, LTXImageToVideoPipeline)
    releases = LTX_VIDEO
    transformer_class = LTXVideoTransformer3DModel
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": T5EncoderModel,
        "vae": AutoencoderKLLTXVideo,
    }
    block_lists = ("transformer_blocks",)
    unused_matmuls = ("ff.net.2",)
    record_kinds = ("video", "image", "image_to_video")
    size_divisor = _SPATIAL
    frame_step = _TEMPORAL
    default_num_frames = 161
    default_fps = 25.0
    max_prompt_tokens = 128
    default_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    target_sets: ClassVar[TargetSets] = {
        "attention": default_target_modules,
        "all": (*default_target_modules, "ff.net.0.proj", "ff.net.2"),
    }

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("text_encoder", "tokenizer")
        return f"ltx_video/prompt/1 {parts} {dtype} {self.max_prompt_tokens}"

    def load_prompt_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Prompt]], list[Conditioning]]:
        encoder = self.load_component("text_encoder", dtype).to(device)
        pipeline = assemble(LTXPipeline, text_encoder=encoder, tokenizer=self.load_tokenizer())

        @torch.no_grad()
        def encode(prompts: Sequence[Prompt]) -> list[Conditioning]:
            embeds_bld, mask, _, _ = pipeline.encode_prompt(
                [prompt.text for prompt in prompts],
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_prompt_tokens,
                device=device,
            )
            # What is masked adds nothing to any output, so that it need not be kept.
            return [{"prompt_embeds": row_ld} for row_ld in without_padding(embeds_bld, mask)]

        return encode

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return f"ltx_video/latents/1 {self.folder.fingerprint('vae')} {dtype}"

    def load_media_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Media]], list[EncodedMedia]]:
        vae = self.load_component("vae", dtype).to(device)
        processor = assemble(LTXPipeline, vae=vae).video_processor

        def latents_of(clips: Sequence[Sequence[Image]]) -> torch.Tensor:
            return _encode_latents(vae, processor.preprocess_video([list(frames) for frames in clips]))

        def encode(media: Sequence[Media]) -> list[EncodedMedia]:
            return [
                tensors | {"frame_rate": torch.tensor(item.fps or self.default_fps)}
                for item, tensors in zip(media, encode_clips(media, latents_of), strict=True)
            ]

        return encode

    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        channels = self.folder.component_config("vae")["latent_channels"]
        return channels, (num_frames - 1) // _TEMPORAL + 1, height // _SPATIAL, width // _SPATIAL

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        _, num_frames, height, width = latents_shape
        return num_frames * height * width

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        like = device_and_dtype(transformer)
        embeds_bld, mask = pad_tokens([sample["prompt_embeds"] for sample in conditioning], **like)
        latents_bcfhw, timestep = with_first_frames(noisy_latents, sigma * _NUM_TIMESTEPS, conditioning)
        frame_rate = torch.stack([sample["frame_rate"] for sample in conditioning])
        return model_fn_ltx_video(
            transformer,
            latents_bcfhw.to(**like),
            timestep,
            embeds_bld,
            mask,
            frame_rate=frame_rate.to(like["device"]),
            **gradient_flags(),
        )

    def sample(
        self, transformer: torch.nn.Module, vae_dtype: torch.dtype, requests: Sequence[PreviewRequest]
    ) -> list[list[Image]]:
        like = device_and_dtype(transformer)
        # The image-to-video pipeline hands pictures and latents to the VAE in the dtype of the prompt.
        dtype = like["dtype"] if any(request.inputs for request in requests) else vae_dtype
        vae = self.load_component("vae", dtype).to(like["device"])
        parts = {"vae": vae, "transformer": transformer, "scheduler": self.load_scheduler()}
        return [self._draw(parts, request, like) for request in requests]

    def _draw(self, parts: dict[str, Any], request: PreviewRequest, like: dict[str, Any]) -> list[Image]:
        guided = request.guidance_scale > 1
        prompts = [request.conditioning, *([request.negative] if guided else [])]
        embeds_bld, mask = pad_tokens([prompt["prompt_embeds"] for prompt in prompts], **like)
        mask = embeds_bld.new_ones(embeds_bld.shape[:2]) if mask is None else mask
        pipeline = assemble(LTXImageToVideoPipeline if request.inputs else LTXPipeline, **parts)
        pipeline.set_progress_bar_config(disable=True)
        # With a picture, diffusers draws the noise for the decoding on the device.
        noise_device = like["device"] if request.inputs else "cpu"
        frames: list[Image] = pipeline(
            **preview_start(request),
            prompt_embeds=embeds_bld[:1],
            prompt_attention_mask=mask[:1],
            negative_prompt_embeds=embeds_bld[1:] if guided else None,
            negative_prompt_attention_mask=mask[1:] if guided else None,
            guidance_scale=request.guidance_scale,
            **request.call_arguments(noise_device),
            num_frames=request.num_frames,
            frame_rate=self.default_fps,
            decode_timestep=_DECODE_TIMESTEP,
            decode_noise_scale=_DECODE_NOISE,
        ).frames[0]
        return frames


@torch.no_grad()
def _encode_latents(vae: Any, pixels_bcfhw: torch.Tensor) -> torch.Tensor:
    """(B, 128, f, h, w), fp32, on the CPU: the mode, normalised with what the pipeline undoes."""
    latents_bcfhw = vae.encode(pixels_bcfhw.to(vae.device, vae.dtype)).latent_dist.mode().float()
    normalised_bcfhw: torch.Tensor = LTXPipeline._normalize_latents(
        latents_bcfhw, vae.latents_mean, vae.latents_std, vae.config.scaling_factor
    )
    return normalised_bcfhw.cpu()


def tiny() -> LTXPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels; the real compression, and the sampler's settings of the released model.
    """
    tokenizer = t5_tokenizer()
    text_encoder = tiny_t5(tokenizer)
    with seeded(0):
        transformer = LTXVideoTransformer3DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=text_encoder.config.d_model,
        )
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.95,
        max_shift=2.05,
        base_image_seq_len=1024,
        max_image_seq_len=4096,
        shift_terminal=0.1,
    )
    return LTXPipeline(
        scheduler=scheduler,
        vae=tiny_ltx_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
