"""This file trains MiniMax-H3: clips and images from text, and the audio of clips.

Sources: diffusers ``modular_pipelines/minimax_h3``.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLMiniMaxH3,
    AutoencoderKLMiniMaxH3Audio,
    MiniMaxH3ModularPipeline,
    MiniMaxH3Scheduler,
    MiniMaxH3Transformer3DModel,
)
from diffusers.modular_pipelines import SequentialPipelineBlocks
from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    audio_latent_num_frames as _num_latents,
)
from transformers import Qwen3VLForConditionalGeneration

from diffsynth_lite.core.gradient import gradient_flags
from diffsynth_lite.core.noise.densities import shift_sigma
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.spelling import JOINED_IN_COMFYUI
from diffsynth_lite.media import Audio, AudioFormat, ClipWithAudio, Generated, Media, Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_family import DiffusersFamily, device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.mixins import WithAudio
from diffsynth_lite.pipelines.minimax_h3.forward import (
    BLOCK_LISTS,
    RULES,
    UNUSED_MATMULS,
    model_fn_minimax_h3,
)
from diffsynth_lite.pipelines.minimax_h3.releases import (
    ATTENTION,
    AUDIO_SHIFT,
    FEED_FORWARD,
    LORA_LAYERS,
    MINIMAX_H3,
)
from diffsynth_lite.testing import autoencoders, seeded, text_encoders, tokenizers
from diffsynth_lite.testing.modular import handled_as_others

_EMPTY = " "
"""In place of an empty prompt, which has no token: as a dropped caption and the negative prompt of others."""


class MiniMaxH3(WithAudio, DiffusersFamily):
    """MiniMax-H3, 33 billion parameters: clips and images from text, clips with audio and without.

    Its licence grants no rights in the European Union, the United Kingdom, the Republic of Korea and the
    United States of America, where use needs an authorisation by MiniMax; a run logs it.

    Prompt, audio and clip are one sequence, through 50 blocks in which all see all; two more refine the
    prompt. Qwen3-VL 32B reads it without a template, up to its layer 50: 5,120 numbers a token. Its pipeline
    cuts none; here those of more than 1,024 tokens lose their end. A space takes the place of an empty one,
    which the pipeline refuses, as in musubi-tuner and DiffSynth-Studio.

    The model is distilled to generate without guidance, and plain training undoes that, as its trainers
    report: what was learned then needs guidance, which its pipeline has not. The recipe keeps it by
    `objective.guidance_target: 4`, as diffusion-pipe (``cfg``) and musubi-tuner
    (``--h3_guidance_loss_scale``) do. ai-toolkit has a training adapter in its place
    (`model.training_adapter`: ostris/minimax_h3_training_adapter), SimpleTuner holds a LoRA close to the
    model's own estimates. Scales of guidance above 1 are refused.

    By default clips are trained without audio: none is in the sequence, as in diffusion-pipe, where
    ai-toolkit has noise. With `data.audio: true` it is learned as 40 latents a second of each of two
    channels, at 32 kHz. At each step the sampler has other noise levels for audio (shift 3) than for the clip
    (shift 12), and so has training, as in diffusion-pipe, ai-toolkit, SimpleTuner and DiffSynth-Studio; with
    `objective.audio_noise: own` they are drawn separately. Previews are generated with audio, as the model is
    used.

    Clips have 17 k + 5 frames, at 24 a second. The model was trained on 5 to 15 seconds, and its pipeline
    refuses others; they are trained here, and previews of them generated. An image is one latent frame, which
    the autoencoder decodes badly: previews are clips. Trained on images only, the model loses motion, as
    diffusion-pipe notes. As the model takes one noise level at a time, samples of a batch are run one by one,
    and processes that share its weights (`memory.shard_base`) take one each.

    Not trained: first and last frames (which the text encoder sees), references (``transformer_ref``, another
    model) and pruned files, which diffusers does not read. A LoRA of text to video leaves the model what it
    does with images. A file of the transformer must be as those of Comfy-Org/MiniMax-H3: the authors' own
    have queries, keys and values of each head next to each other, which their names and shapes do not show.
    ComfyUI takes what ``diffsynth-lite convert --to comfyui`` makes of a LoRA. The modulation
    (``adaln_proj``) is not in `all`: pruned models have another one.
    """

    pipelines = (MiniMaxH3ModularPipeline,)
    releases = MINIMAX_H3
    notice = (
        "The licence of MiniMax-H3 grants no rights in the European Union, the United Kingdom, the Republic "
        "of Korea and the United States of America, where use needs an authorisation by MiniMax. That goes "
        "for LoRAs and for what is generated, too: read LICENSE in MiniMaxAI/MiniMax-H3. The model is "
        "distilled to generate without guidance, which training undoes without objective.guidance_target or "
        "model.training_adapter."
    )
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "minimax_h3_lora.yaml"}
    transformer_class = MiniMaxH3Transformer3DModel
    encoder_classes: ClassVar[Mapping[str, Any]] = {
        "text_encoder": Qwen3VLForConditionalGeneration,
        "vae": AutoencoderKLMiniMaxH3,
        "audio_vae": AutoencoderKLMiniMaxH3Audio,
    }
    components_without_weights = ("scheduler", "audio_scheduler", "tokenizer", "processor")
    lora_spelling = JOINED_IN_COMFYUI
    lora_layers = LORA_LAYERS
    block_lists = BLOCK_LISTS
    unused_matmuls = UNUSED_MATMULS
    record_kinds = ("video", "image")
    splits_batches = True
    frame_step = 17
    frame_rest = 5
    default_num_frames = 124
    default_fps = 24.0
    size_divisor = 32
    max_prompt_tokens = 1024
    min_inference_steps = 2
    patch = 2
    takes_guidance = False
    has_guidance = False
    prompt_id = "minimax_h3/prompt/1"
    latents_id = "minimax_h3/latents/1"
    prompt_width = "text_dim"
    prompt_template = (RULES.text_encoder_layer, _EMPTY)
    default_target_modules = (*ATTENTION, *FEED_FORWARD)
    target_sets: ClassVar[TargetSets] = {"attention": ATTENTION, "all": default_target_modules}

    @property
    def audio_format(self) -> AudioFormat:
        """That of the folder's autoencoder for audio, in stereo."""
        rate = self.folder.component_config("audio_vae")["sampling_rate"]
        return AudioFormat(sample_rate=rate, num_channels=RULES.audio_channels)

    def audio_latents_shape(self, num_frames: int, fps: float) -> tuple[int, ...] | None:
        if num_frames == 1:
            return None
        if fps != RULES.fps:
            raise UserError(
                f"data.fps: {fps:g}, and this model makes clips with audio at {RULES.fps}; set it to that, "
                "or data.audio: false"
            )
        channels = self.folder.component_config("audio_vae")["latent_channels"]
        return RULES.audio_channels, channels, _num_latents(num_frames)

    def audio_sigma(self, sigma: torch.Tensor) -> torch.Tensor:
        """That of the same step of its sampler, whose shift is 12 for clips and 3 for audio."""
        return shift_sigma(sigma, self._audio_shift / self.family_shift(()))

    @cached_property
    def _audio_shift(self) -> float:
        return float(self.folder.component_config("audio_scheduler").get("shift", AUDIO_SHIFT))

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """That of the folder's sampler, 12; of audio 3."""
        return self._audio_shift if len(latents_shape) == 3 else float(self.scheduler_config["shift"])

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        if len(latents_shape) == 3:  # (2, C, L) of audio, where a clip has (C, F, H, W)
            return latents_shape[0] * latents_shape[2]
        return super().num_tokens(latents_shape)

    def latents_shape(self, width: int, height: int, num_frames: int) -> tuple[int, ...]:
        config = self.folder.component_config("vae")
        scale = math.prod(config["spatial_downsample_factors"])
        frames = 1 if num_frames == 1 else num_frames // self.frame_step * 5 + 2
        return config["latent_channels"], frames, height // scale, width // scale

    def load_transformer(self, dtype: torch.dtype) -> torch.nn.Module:
        model = super().load_transformer(dtype)
        for name, module in model.named_modules():
            if name.endswith("adaln_proj.linear"):
                # Its dtype is asked for where no parameter is left, as weights are streamed or spread:
                # diffusers 0.42.1 then looks at buffers, and fails without any.
                module.register_buffer("of_dtype", torch.empty(0, dtype=dtype), persistent=False)
        return model

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        # Of its processor, whose class needs torchvision, texts only ask that no token is of an image.
        reader = SimpleNamespace(create_mm_token_type_ids=lambda rows: [[0] * len(row) for row in rows])
        encoder, layer, encoded = pipeline.text_encoder, RULES.text_encoder_layer, []
        for prompt in prompts:
            tokens = pipeline.tokenizer(prompt.text or _EMPTY, add_special_tokens=False)["input_ids"]
            given = encoder, reader, tokens[: self.max_prompt_tokens], None, layer, device, encoder.dtype
            encoded.append({"prompt_embeds": get_qwen3vl_prompt_embeds(*given)[0].cpu()})
        return encoded

    def fingerprint(self) -> str:
        base = super().fingerprint()
        return f"{base} {self.folder.fingerprint('audio_scheduler')}" if self.with_audio else base

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        of_clip = super().media_encoder_id(dtype)
        return f"{of_clip} audio/1 {self.folder.fingerprint('audio_vae')}" if self.with_audio else of_clip

    def encode_pixels(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Normalised latents, (B, 24, F, H, W) in fp32, on the CPU.

        Args:
            pixels: (B, 3, F, H, W), in [0, 1], as the pipeline's processor gives them.
        """
        mean, std = (torch.tensor(of).view(-1, 1, 1, 1) for of in (RULES.pixel_mean, RULES.pixel_std))
        latents = vae.encode(((pixels - mean) / std).to(vae.device)).latent_dist.mode().float().cpu()
        return _normalised(latents, vae, -1, 1, 1, 1)

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = super().media_pipeline(dtype, device)
        if self.with_audio:
            audio_vae = self.load_component("audio_vae", torch.float32).to(device)
            pipeline.update_components(audio_vae=audio_vae)
        return pipeline

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        num_frames = len(item.frames)
        if not self.with_audio or num_frames == 1:
            return {}
        audio_vae = pipeline.audio_vae
        audio = item.audio or Audio.silent(self.audio_format, num_frames / RULES.fps)
        latents_kcl = audio_vae.encode(audio.waveform[:, None].to(audio_vae.device)).latent_dist.mode().cpu()
        return {"audio_latents": _normalised(latents_kcl[..., : _num_latents(num_frames)], audio_vae, -1, 1)}

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        (velocity,) = self._predict(transformer, conditioning, (noisy_latents,), (sigma,))
        return velocity

    def predict_with_audio(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        noisy_audio_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        *,
        audio_sigma: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        levels = sigma, self.audio_sigma(sigma) if audio_sigma is None else audio_sigma
        video, audio = self._predict(transformer, conditioning, (noisy_latents, noisy_audio_latents), levels)
        return video, audio

    def _predict(
        self,
        transformer: torch.nn.Module,
        conditioning: Sequence[Conditioning],
        noisy: Sequence[torch.Tensor],
        levels: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The estimates of clips and, where it is given, of their audio, sample by sample.

        Args:
            noisy: (B, ...) of each of the two, and ``levels`` their noise levels, (B,).
        """
        like = device_and_dtype(transformer)
        rows = [
            model_fn_minimax_h3(
                transformer,
                [part[place, None].to(**like) for part in noisy],
                [1 - level[place, None] for level in levels],
                one["prompt_embeds"][None].to(**like),
                **gradient_flags(),
            )
            for place, one in enumerate(conditioning)
        ]
        return [-torch.cat(parts) for parts in zip(*rows, strict=True)]

    def preview_pipeline(self, model: torch.nn.Module, vae_dtype: torch.dtype, **settings: Any) -> Any:
        """Of the blocks after those that encode prompts, for clips of any length."""
        device = device_and_dtype(model)["device"]
        whole = MiniMaxH3ModularPipeline().blocks.sub_blocks
        blocks = {**whole["denoise"].sub_blocks["t2va"].sub_blocks, **whole["decode"].sub_blocks}
        parts = {"transformer": model, "vae": self.load_preview_vae(vae_dtype, device)}
        if self.with_audio:
            parts["audio_vae"] = self.load_component("audio_vae", torch.float32).to(device)
        else:
            del blocks["audio"]
        pipeline = _OfAnyLength(blocks=SequentialPipelineBlocks.from_blocks_dict(blocks))
        of_audio = MiniMaxH3Scheduler(self._audio_shift)
        pipeline.update_components(**parts, scheduler=self.load_scheduler(), audio_scheduler=of_audio)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def usage_setup(self, request: PreviewRequest) -> list[str]:
        if RULES.min_duration <= request.num_frames / RULES.fps <= RULES.max_duration:
            return []
        lengths = "type(pipeline).min_duration, type(pipeline).max_duration = 0.0, 1e9"
        return ["# Else it refuses clips of this length.", lengths]

    def generate(self, pipeline: Any, request: PreviewRequest) -> Generated:
        prompt_bld = request.conditioning["prompt_embeds"][None].to(**device_and_dtype(pipeline.transformer))
        output = pipeline(
            prompt_embeds=prompt_bld,
            text_token_tags=torch.full(prompt_bld.shape[1:2], RULES.text_tag),
            num_frames=request.num_frames,
            output_type="pil",
            **request.call_arguments(),
        )
        frames = output.get("videos")[0]
        if not self.with_audio:
            return list(frames)
        waveform = output.get("audio")[0].float().cpu()
        audio = Audio(waveform=waveform, sample_rate=output.get("sampling_rate"))
        return ClipWithAudio(frames=list(frames), audio=audio)


class _OfAnyLength(MiniMaxH3ModularPipeline):  # type: ignore[misc]  # diffusers' class has no types
    """Its pipeline, also for clips of other lengths than its model was trained on."""

    min_duration, max_duration = 0.0, math.inf


def _normalised(latents: torch.Tensor, vae: Any, *shape: int) -> torch.Tensor:
    mean, std = (torch.tensor(of).view(shape) for of in (vae.config.latents_mean, vae.config.latents_std))
    return (latents - mean) / std


def tiny() -> MiniMaxH3ModularPipeline:
    """A random, complete and small pipeline of the real classes, built offline in a second.

    Two blocks of 32 channels, and one that refines the prompt; the real rates of both autoencoders. Its
    processor does the same with texts as that of the released model, whose class needs torchvision.
    """
    tokenizer = tokenizers.qwen2_tokenizer()
    # A layer more than the last that is read, which has no norm after it.
    text_encoder = text_encoders.tiny_qwen3_vl_lm(tokenizer, num_layers=RULES.text_encoder_layer + 1)
    with seeded(0):
        transformer = MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=32,
            num_layers=2,
            num_refiner_layers=1,
            ffn_dim=32,
            in_channels=4,
            audio_in_channels=32,
            text_dim=text_encoder.config.text_config.hidden_size,
            freq_dim=16,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
        )
    pipeline = handled_as_others(MiniMaxH3ModularPipeline)()
    pipeline.update_components(
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=tokenizers.qwen3_vl_processor(tokenizer),
        transformer=transformer.eval(),
        vae=autoencoders.tiny_minimax_h3_vae(),
        audio_vae=autoencoders.tiny_minimax_h3_audio_vae(),
        scheduler=MiniMaxH3Scheduler(),
        audio_scheduler=MiniMaxH3Scheduler(shift=AUDIO_SHIFT),
    )
    return pipeline
