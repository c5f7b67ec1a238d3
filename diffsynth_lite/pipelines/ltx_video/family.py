"""This file trains LTX-Video: clips from text, and from text with their first frame.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels.
Sources: diffusers ``transformer_ltx.py``, ``pipeline_ltx.py``, ``pipeline_ltx_image2video.py`` and
``pipeline_ltx_condition.py``.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Unpack

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
)
from transformers import T5EncoderModel

from diffsynth_lite.core.gradient import gradient_checkpoint_forward
from diffsynth_lite.core.parallel import SequenceSplit
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed, under
from diffsynth_lite.lora.shared_names import ATTENTIONS, DOUBLE, EMBEDDER
from diffsynth_lite.lora.spelling import Spelling
from diffsynth_lite.media import Media, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.first_frame import (
    encode_start,
    preview_start,
    start_code,
    with_first_frames,
)
from diffsynth_lite.pipelines.base.model_function import (
    Checkpointing,
    checkpointed,
    model_function,
    padded_together,
    stacked,
)
from diffsynth_lite.pipelines.base.preview_request import Code
from diffsynth_lite.pipelines.ltx_video.releases import LTX_SCHEDULER, LTX_VIDEO
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers

_SPATIAL = 32
_TEMPORAL = 8
_DECODING = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
"""For autoencoders that remove noise while they decode, 0.9.1 and later; source: ``configs/`` of Lightricks'
LTX-Video, which has these of all releases."""
_START_NOISE = 0.15
"""Default of ``image_cond_noise_scale`` of ``LTXConditionPipeline``."""


@model_function
def model_fn_ltx_video(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    *,
    frame_rate: torch.Tensor,
    causal_positions: bool = False,
    **checkpointing: Unpack[Checkpointing],
) -> torch.Tensor:
    """One forward of LTX-Video, each transformer block run by the gradient engine.

    Args:
        transformer: a ``LTXVideoTransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 128, F, H, W), noisy normalised latents.
        timestep: (B,), or (B, F * H * W) with one for each token, in [0, 1000].
        prompt_embeds_bld: (B, L, D) prompt embeddings, padded on the right.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for padding; None when no prompt is padded.
        frame_rate: (B,), frames per second of the clips: positions in time are in seconds.
        causal_positions: the first latent frame, which is of one frame of the clip, is as near to the next as
            that: as of 0.9.5. Before, latent frames are 8 frames from each other.

    Returns:
        (B, 128, F, H, W), the predicted velocity ``noise - latents``.
    """
    num_frames, height, width = latents_bcfhw.shape[2:]
    positions = (_causal_positions if causal_positions else _even_positions)(latents_bcfhw.shape, frame_rate)
    with checkpointed(LTXVideo, transformer, gradient_checkpoint_forward, **checkpointing):
        velocity_bld = transformer(
            hidden_states=LTXPipeline._pack_latents(latents_bcfhw),
            timestep=timestep,
            encoder_hidden_states=prompt_embeds_bld,
            encoder_attention_mask=prompt_embeds_mask,
            **positions,
            return_dict=False,
        )[0]
    velocity_bcfhw: torch.Tensor = LTXPipeline._unpack_latents(velocity_bld, num_frames, height, width)
    return velocity_bcfhw


def _even_positions(shape: Sequence[int], frame_rate: torch.Tensor) -> dict[str, Any]:
    """Arguments of the transformer: what ``LTXPipeline`` gives it, for each clip by its own frame rate."""
    _, _, num_frames, height, width = shape
    return {
        "num_frames": num_frames,
        "height": height,
        "width": width,
        # Axes as diffusers multiplies them: (B, 1, F, H, W).
        "rope_interpolation_scale": (_TEMPORAL / frame_rate.view(-1, 1, 1, 1, 1), _SPATIAL, _SPATIAL),
    }


def _causal_positions(shape: Sequence[int], frame_rate: torch.Tensor) -> dict[str, Any]:
    """Arguments of the transformer: what ``LTXConditionPipeline`` gives it, (B, 3, L): seconds and pixels."""
    batch, _, num_frames, height, width = shape
    places = LTXConditionPipeline._prepare_video_ids(
        batch, num_frames, height, width, device=frame_rate.device
    )
    coords = LTXConditionPipeline._scale_video_ids(
        places, scale_factor=_SPATIAL, scale_factor_t=_TEMPORAL
    ).float()
    coords[:, 0] *= 1 / frame_rate[:, None]
    return {"video_coords": coords}


_TIME = ("time_embed.emb.timestep_embedder.linear_1", "time_embed.emb.timestep_embedder.linear_2")
_CAPTIONS = under("caption_projection", EMBEDDER)
_LORA_LAYERS = LayerNames(
    layers=(
        *under(DOUBLE, (*ATTENTIONS, "ff.net.0.proj", "ff.net.2")),
        *(*_TIME, "time_embed.linear", *_CAPTIONS, "proj_in", "proj_out"),
    ),
    kohya={
        "patchify_proj": renamed("proj_in"),
        "adaln_single.linear": renamed("time_embed.linear"),
        **{layer.replace("time_embed", "adaln_single"): renamed(layer) for layer in _TIME},
    },
)


class LTXVideo(DiffusersFamily):
    """LTX-Video 0.9 to 0.9.8, 2B and 13B, from text, and from text with a first frame.

    28 blocks (13B: 48), T5 prompts, a causal VAE of 128 channels: 1/8 of the frames, 1/32 of the size.
    Positions in time are in seconds: of the rate that clips are read at, ``data.fps``, which previews are
    generated for, too.

    0.9.5 and later, of ``LTXConditionPipeline``, have other positions in time, longer prompts, and a little
    noise on a first frame. A folder with their autoencoder is one of them also where it names
    ``LTXPipeline``, as diffusers' conversion script does for 0.9.5. Their sampler has no shift, so that
    ``objective.shift: family`` trains all noise levels alike; Lightricks' own trainer trains high ones more,
    as the recipe does. The distilled ones (0.9.7, 0.9.8) cannot be distinguished from the others by their
    files; training undoes the distillation to 4 to 10 steps. The upscalers are other models.

    A clip with a first frame is trained as the pipelines sample it: the first latent frame is that of the
    image, at timestep 0, and does not count in the loss. Its latents are drawn again in each step, from the
    mean and standard deviation that the autoencoder gives them; from 0.9.5 on with added noise of 0.15
    sigma^2, the default ``image_cond_noise_scale``. It takes clips of 9 frames or more; a last frame is an
    error.
    """

    pipelines = (LTXPipeline, LTXImageToVideoPipeline, LTXConditionPipeline)
    releases = LTX_VIDEO
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "ltx_video_lora.yaml"}
    transformer_class = LTXVideoTransformer3DModel
    lora_spelling = Spelling(
        prefixes={"transformer": "diffusion_model"}, unknown_to_comfyui=("proj_in", "time_embed")
    )
    """Diffusers' names but for the prefix; those of the two layers would be others in ComfyUI."""
    lora_layers: ClassVar[LoraLayers] = {"transformer": _LORA_LAYERS}
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": T5EncoderModel,
        "vae": AutoencoderKLLTXVideo,
    }
    block_lists = ("transformer_blocks",)
    unused_matmuls = ("ff.net.2",)
    # diffusers 0.42 splits prompts, too, whose mask it then has for all heads where a process has some; and
    # it does not split the timesteps of clips with a first frame.
    sequence_split = SequenceSplit(
        whole_inputs=("encoder_hidden_states", "encoder_attention_mask"),
        whole_attention=("attn2",),
        token_inputs=("timestep",),
    )
    record_kinds = ("video", "image", "image_to_video")
    size_divisor = _SPATIAL
    model_fn = model_fn_ltx_video
    num_timesteps = 1000
    # The length, which is a part of its id, also distinguishes the pipelines: that of 256 tokens hides the
    # padding from T5. What is masked adds nothing to any output, so that it need not be kept.
    prompt_id = "ltx_video/prompt/1"
    latents_id = "ltx_video/latents/2"
    frame_step = _TEMPORAL
    default_num_frames = 161
    default_fps = 25.0
    default_target_modules = ("to_q", "to_k", "to_v", "to_out.0")
    target_sets: ClassVar[TargetSets] = {
        "attention": default_target_modules,
        "all": (*default_target_modules, "ff.net.0.proj", "ff.net.2"),
    }

    @cached_property
    def _takes_conditions(self) -> bool:
        """Whether the folder holds 0.9.5 or later, which are sampled by ``LTXConditionPipeline``."""
        blocks = self.folder.component_config("vae").get("down_block_types", ())
        named = self.folder.pipeline_class_name()
        return named == LTXConditionPipeline.__name__ or "LTXVideo095DownBlock3D" in blocks

    @cached_property
    def pipeline(self) -> Any:
        return LTXConditionPipeline if self._takes_conditions else super().pipeline

    @property
    def max_prompt_tokens(self) -> int:
        """128; from 0.9.5 on 256."""
        return 256 if self._takes_conditions else 128

    def check_scheduler(self, scheduler: Any) -> None:
        super().check_scheduler(scheduler)
        if self._takes_conditions and scheduler.config.get("use_dynamic_shifting"):
            raise UserError(
                f"model.path: {self.folder.path / 'scheduler'} has use_dynamic_shifting, with which "
                "LTXConditionPipeline cannot generate; set it to false there, as it is in 0.9.5 and 0.9.7"
            )

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = super().media_pipeline(dtype, device)
        # Encoding asks for it, too. Previews are not decoded so: in diffusers 0.42.1 the frames of each part
        # but the first come one place late.
        pipeline.vae.use_framewise_decoding = self.vae_tiles is not None
        return pipeline

    def with_given(self, latents: torch.Tensor, given: EncodedMedia) -> EncodedMedia:
        if "first_frame_latents" in given:
            # So that the rest of the noisy latents there is noise, to draw those of the image with.
            latents[:, :1] = given["first_frame_latents"]
        return super().with_given(latents, given)

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        given = encode_start(self, pipeline, item)
        if item.first_frame is not None:
            vae = pipeline.vae
            pixels_bcfhw = pipeline.video_processor.preprocess_video([[item.first_frame]])
            std_bcfhw = vae.encode(pixels_bcfhw.to(vae.device, vae.dtype)).latent_dist.std.float().cpu()
            of_channels = vae.latents_std.float().cpu().view(-1, 1, 1, 1)
            given["first_frame_std"] = (std_bcfhw * vae.config.scaling_factor / of_channels)[0]
        return {**given, "frame_rate": torch.tensor(item.fps or self.default_fps)}

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """That of the folder's sampler, which grows with the clip, to the end of its line; 1 from 0.9.5 on.

        The scheduler's file gives the line up to 4096 tokens, where the shift is 7.8. The sampler continues
        along it (``objective.shift: resolution``), to 32 at 768 x 512 pixels and 161 frames, which leaves 3 %
        of the steps for noise levels below 0.5, where detail is learned. The trainer of LTX-2 by Lightricks
        ends it there, too (``timestep_samplers.py``), though their earlier one for LTX-Video did not;
        ``set_timesteps_ltx2`` of DiffSynth-Studio trains clips of any size as if they had 4096 tokens. From
        0.9.5 on the file gives no line, and the recipe sets the shift of that trainer.
        """
        shift = super().family_shift(latents_shape)
        if not self.scheduler_config.get("use_dynamic_shifting"):
            return shift
        return min(shift, math.exp(self.scheduler_config.get("max_shift", 1.15)))

    def earlier_shift(self, latents_shape: Sequence[int]) -> float:
        return super().family_shift(latents_shape)

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        width = self.folder.component_config("transformer")["caption_channels"]
        rate = torch.tensor(self.default_fps)
        return {"prompt_embeds": torch.ones(self.max_prompt_tokens, width), "frame_rate": rate}

    def noisy_inputs(
        self,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        like: Mapping[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        noise_scale = _START_NOISE if self._takes_conditions else 0.0
        starts = [
            _with_drawn_start(sample, noisy_cfhw, level, noise_scale)
            for sample, noisy_cfhw, level in zip(conditioning, noisy_latents, sigma, strict=True)
        ]
        return with_first_frames(noisy_latents, self.timestep(sigma, like), starts)

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **super().model_inputs(conditioning, like),
            "frame_rate": stacked(conditioning, "frame_rate", {"device": like["device"]}),
            "causal_positions": self._takes_conditions,
        }

    @property
    def encodes_as_model(self) -> bool:
        """The image-to-video pipeline does."""
        return not self._takes_conditions

    def pipeline_for(self, request: PreviewRequest) -> Any:
        if self._takes_conditions:
            return LTXConditionPipeline
        return LTXImageToVideoPipeline if request.inputs else LTXPipeline

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        arguments = {**_DECODING, **start_code(request)}
        if self.pipeline_for(request) is LTXImageToVideoPipeline:  # on the device, as in generate
            arguments["generator"] = Code(f'torch.Generator("cuda").manual_seed({request.seed})')
        return arguments

    def prompt_arguments(
        self, prompts: Mapping[str, Conditioning], like: Mapping[str, Any]
    ) -> dict[str, Any]:
        # As long as the pipeline's own: a shorter sum would be rounded otherwise.
        return padded_together(prompts, "prompt_attention_mask", like, length=self.max_prompt_tokens)

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        own = {"frame_rate": request.fps or self.default_fps, **preview_start(request), **_DECODING}
        if isinstance(pipeline, LTXImageToVideoPipeline):
            # This one draws the noise for the decoding on the device.
            device = device_and_dtype(pipeline.transformer)["device"]
            own["generator"] = torch.Generator(device).manual_seed(request.seed)
        return super().call_arguments(pipeline, request) | own


def _with_drawn_start(
    sample: Conditioning, noisy_cfhw: torch.Tensor, sigma: torch.Tensor, noise_scale: float
) -> Conditioning:
    """A sample whose first frame, if it has one, is drawn as the pipelines draw it.

    Drawn is with the noise of the noisy latents there, of which nothing else makes use: these are
    ``1 - sigma`` of the first frame and ``sigma`` of the noise.

    Args:
        noisy_cfhw: (C, F, H, W), its noisy latents.
        sigma: (), their noise level.
        noise_scale: ``image_cond_noise_scale`` of ``LTXConditionPipeline``: noise of this times sigma^2 comes
            on top. The sum of two draws is one of the root of the sum of their variances.
    """
    if "first_frame_latents" not in sample:
        return sample
    first_cfhw, std_cfhw = (
        sample[f"first_frame_{name}"].to(noisy_cfhw.device) for name in ("latents", "std")
    )
    noise_cfhw = (noisy_cfhw[:, :1] - (1 - sigma) * first_cfhw) / sigma.clamp(min=1e-6)
    scale_cfhw = (std_cfhw**2 + (noise_scale * sigma**2) ** 2).sqrt()
    return sample | {"first_frame_latents": first_cfhw + scale_cfhw * noise_cfhw}


def tiny() -> LTXPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels; the real compression, and the sampler's settings of the released model.
    """
    tokenizer = tokenizers.t5_tokenizer()
    text_encoder = text_encoders.tiny_t5(tokenizer)
    with seeded(0):
        transformer = LTXVideoTransformer3DModel(
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            caption_channels=text_encoder.config.d_model,
        )
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**LTX_SCHEDULER.config),
        vae=autoencoders.tiny_ltx_vae(),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    )
