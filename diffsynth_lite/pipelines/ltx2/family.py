"""This file trains LTX-2: clips from text, and from text with their first frame, and their audio.

Sources: diffusers ``pipeline_ltx2.py`` and ``pipeline_ltx2_image2video.py``; the ``ltx-trainer`` of
Lightricks' LTX-2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2ConditionPipeline,
    LTX2ImageToVideoPipeline,
    LTX2InContextPipeline,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder, LTX2VocoderWithBWE
from diffusers.pipelines.ltx2.utils import DEFAULT_IMAGE_CRF, LTX2_5_IMAGE_CRF, apply_image_conditioning_crf
from PIL import Image
from transformers import Gemma3ForConditionalGeneration, Gemma4UnifiedForConditionalGeneration

from diffsynth_lite.core.gradient import count_blocks, gradient_flags
from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Audio, AudioFormat, ClipWithAudio, Generated, Media, Prompt, RecordKind
from diffsynth_lite.pipelines.base.diffusers_components import assemble
from diffsynth_lite.pipelines.base.diffusers_family import device_and_dtype
from diffsynth_lite.pipelines.base.family import Conditioning, EncodedMedia, PreviewRequest, TargetSets
from diffsynth_lite.pipelines.base.first_frame import (
    encode_start,
    preview_start,
    start_code,
    with_first_frames,
)
from diffsynth_lite.pipelines.base.mixins import WithAudio
from diffsynth_lite.pipelines.base.model_function import stacked
from diffsynth_lite.pipelines.base.preview_request import in_turn
from diffsynth_lite.pipelines.ltx2.audio import COMPRESSION, encode_audio, num_audio_latents
from diffsynth_lite.pipelines.ltx2.controls import (
    CONTROL,
    METADATA,
    control_arguments,
    control_code,
    control_shape,
    encode_control,
)
from diffsynth_lite.pipelines.ltx2.forward import BLOCK_LISTS, UNUSED_MATMULS, model_fn_ltx2
from diffsynth_lite.pipelines.ltx2.generation import STREAMS, Connected, ReleasedSampler, prompt_arguments
from diffsynth_lite.pipelines.ltx2.names import LTX2_LAYERS, LTX2_NAMES
from diffsynth_lite.pipelines.ltx2.releases import LTX_2
from diffsynth_lite.pipelines.ltx2.tiny import tiny as tiny

_SPATIAL = 32
_TEMPORAL = 8
_NUM_TIMESTEPS = 1000
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_GATES = ("to_gate_logits",)
_AUDIO_ONLY = ("audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn", "audio_ff")
"""Parts of a block that do nothing for a clip without its audio."""
_GEMMA4 = Gemma4UnifiedForConditionalGeneration


class LTX2(WithAudio, ReleasedSampler):
    """LTX-2, LTX-2.3 and LTX-2.5, from text, a first frame and a control clip, with audio and without.

    48 blocks with two streams, one for the clip and one for its audio, prompts by Gemma 3 12B, of LTX-2.5 by
    its own Gemma 4 12B, a causal video VAE of 128 channels: 1/8 of the frames, 1/32 of the size. Positions in
    time are in seconds, so that each clip trains at its own frame rate, and previews are generated at the one
    that they are played at.

    By default the clip is trained without its audio, as by Lightricks' trainer: the streams are kept separate
    (``isolate_modalities``), and no layer of the audio or between the two gets a LoRA, because none would get
    a gradient. Previews are generated as the model is used, clip and audio together, with attention between
    them; the audio is then dropped.

    With `data.audio: true` both are trained, with attention and LoRA also between the streams, and previews
    have their audio. It is learned as 25 latents a second of mel spectrograms, of 16 kHz and two channels.
    Their autoencoder is diffusers', which has no way to its spectrogram: that is computed as Lightricks'
    ltx-core does. Images are trained without.

    Audio is at the noise level of its clip, as in ai-toolkit, DiffSynth-Studio and SimpleTuner, or with
    `objective.audio_noise: own` at one that is drawn for it by its own number of tokens, as in the strategy
    `flexible` that all configs of Lightricks' trainer name. AkaneTendo25's fork of musubi-tuner has both
    (`--independent_audio_timestep`).

    How much the streams take from each other is modulated by noise levels: diffusers, and so training with a
    shared level and previews, takes the other stream's for all of it, where ltx-core and ComfyUI scale and
    shift by the stream's own, which is 0 in a first frame, and only gate by the other's. The two differ where
    a clip with audio starts from an image. With `own` it is as in ltx-core.

    Gemma's layers go through the folder's ``connectors``, whose output for each stream is kept: always 1024
    tokens, padding filled with registers, of 2 x 3840 numbers, from LTX-2.3 on 4096 and 2048. In bfloat16 a
    prompt of any length takes 15.7 MB of the cache, from LTX-2.3 on 12.6 MB.

    A clip with a first frame is trained as its pipeline samples it: the first latent frame is that of the
    image, at timestep 0, and does not count in the loss. The image goes through H.264 first, as there
    (``image_crf`` 33, of LTX-2.5 18). It takes clips of 9 frames or more; a last frame is an error.

    A clip with a control follows it (IC-LoRA). The control, which diffusers calls a reference, has as many
    frames: its clean tokens, at timestep 0, come after the noisy ones, at the same positions, and count
    neither in the loss nor in the shift of the noise levels. All items of a run have a control, or none has;
    they may have first frames and audio, too. LoRAs that were trained without controls, and those of
    Lightricks' trainer, load with ``lora.init_from``. Previews that follow ``validation.control`` are made by
    ``LTX2InContextPipeline``, whose sampler counts the tokens of both clips for its shift.

    With ``data.control_downscale: 2`` a control has half the width and height, and a quarter of the tokens,
    whose positions are spread over the whole clip, as by ``--reference-downscale-factor`` of Lightricks'
    trainer. The LoRA file holds the number as ``reference_downscale_factor``, where ltx-pipelines and the
    nodes of ComfyUI-LTXVideo read it; diffusers is given it in the call. Controls with fewer frames, several
    of them, references of audio and weaker attention (``conditioning_attention_strength``) are not trained.

    A preview with guidance has all of the pipeline's defaults: for the audio a scale of 7, guidance against
    streams kept separate with 3, rescaling with 0.7 and, from LTX-2.3 on, against a block without attention
    with 1; that is three runs of the model a step, or four. With a scale of 1 it has none.

    The shift grows with the clip up to 4096 tokens, as of ``ltx_video``: there the noise level is 0.80 in the
    mean. The recipe has the noise levels of Lightricks' trainer, 0.75 at its 4,224 tokens (`timestep_density:
    stretched_logit_normal`), whose line continues beyond these (`shift: resolution`). The upscalers are
    refused.

    The folder of LTX-2.5, ``Lightricks/LTX-2.5-Diffusers``, has two transformers, and its index names the
    distilled one. Train the full one: ``ltx-2.5-22b-dev-transformer-bf16.safetensors`` of
    ``Lightricks/LTX-2.5``, as ``model.transformer_file``. Previews then have the sampler that diffusers' page
    gives for it, unless the name of the file has "distilled" in it. Of a distilled model, previews of 8 steps
    have the noise levels that it was distilled to; ``validation.model_path: Lightricks/LTX-2.5-Diffusers``
    with a ``guidance_scale`` of 1 shows the LoRA on it. LoRAs of LTX-2 and LTX-2.3 load with
    ``lora.init_from``. Previews are decoded by the autoencoder, not by the diffusion decoder; the prompt
    enhancer and the duration head are not used, and keyframes that the model generates are not trained.
    """

    pipelines = (LTX2Pipeline, LTX2ImageToVideoPipeline, LTX2ConditionPipeline, LTX2InContextPipeline)
    releases = LTX_2
    starting_recipes: ClassVar[Mapping[RecordKind, str]] = {"video": "ltx2_lora.yaml"}
    transformer_class = LTX2VideoTransformer3DModel
    lora_spelling = LTX2_NAMES
    lora_layers = LTX2_LAYERS
    block_lists = BLOCK_LISTS
    unused_matmuls = UNUSED_MATMULS
    record_kinds = ("video", "image", "image_to_video", "control")
    frame_step = _TEMPORAL
    default_num_frames = 121
    default_fps = 24.0
    max_prompt_tokens = 1024
    keeps_padding = True
    takes_small_controls = True
    default_target_modules = _ATTENTION

    @property
    def size_divisor(self) -> int:
        """32 times `data.control_downscale`."""
        return _SPATIAL * self.control_downscale

    @property
    def encoder_classes(self) -> Mapping[str, Any]:
        extends = self._class_name("vocoder") == LTX2VocoderWithBWE.__name__
        return {
            "text_encoder": _GEMMA4 if self._is_2_5 else Gemma3ForConditionalGeneration,
            "connectors": LTX2TextConnectors,
            "vae": AutoencoderKLLTX2Video,
            "audio_vae": AutoencoderKLLTX2Audio,
            "vocoder": LTX2VocoderWithBWE if extends else LTX2Vocoder,
        }

    def _class_name(self, component: str) -> str:
        _, name = self.folder.parts().get(component, ("", ""))
        return name

    @cached_property
    def _is_2_5(self) -> bool:
        return bool(self._class_name("text_encoder") == _GEMMA4.__name__)

    @property
    def image_crf(self) -> int:
        """How strongly H.264 compresses the image that a clip starts from, by the release."""
        return int(LTX2_5_IMAGE_CRF if self._is_2_5 else DEFAULT_IMAGE_CRF)

    @cached_property
    def _transformer_config(self) -> Mapping[str, Any]:
        return self.folder.component_config("transformer")

    @cached_property
    def _audio_config(self) -> Mapping[str, Any]:
        return self.folder.component_config("audio_vae")

    @property
    def audio_format(self) -> AudioFormat:
        """That of the folder's autoencoder for audio."""
        rate, channels = self._audio_config["sample_rate"], self._audio_config["in_channels"]
        return AudioFormat(sample_rate=rate, num_channels=channels)

    def audio_latents_shape(self, num_frames: int, fps: float) -> tuple[int, ...] | None:
        if num_frames == 1:
            return None
        length = num_audio_latents(self._audio_config, num_frames, fps)
        return self._audio_config["latent_channels"], length, self._audio_config["mel_bins"] // COMPRESSION

    @property
    def target_sets(self) -> TargetSets:
        """With the feed-forward of the audio where it is learned; from LTX-2.3 on attention has gates."""
        attention = (*_ATTENTION, *_GATES) if self._transformer_config.get("gated_attn") else _ATTENTION
        streams = ("ff", "audio_ff") if self.with_audio else ("ff",)
        feed_forward = (f"{ff}.net.{layer}" for ff in streams for layer in ("0.proj", "2"))
        return {"attention": attention, "all": (*attention, *feed_forward)}

    def unused_modules(self, model: torch.nn.Module) -> list[str]:
        if self.with_audio:
            return []
        (blocks,) = self.block_lists
        places = range(count_blocks(model, [blocks]))
        return [f"{blocks}.{place}.{name}" for place in places for name in _AUDIO_ONLY]

    def check_size(self, width: int, height: int, *, keys: str) -> None:
        super().check_size(width, height, keys=keys)
        mirrors = (
            self.folder.component_config("vae").get("decoder_spatial_padding_mode", "reflect") == "reflect"
        )
        if mirrors and min(width, height) < 2 * _SPATIAL:
            raise UserError(
                f"{keys}: {width}x{height} has a side of {_SPATIAL} pixels, which the autoencoder of LTX-2, "
                f"mirroring what it decodes at its edges, cannot decode; take {2 * _SPATIAL} or more"
            )

    def prompt_encoder_id(self, dtype: torch.dtype) -> str:
        parts = self.folder.fingerprints("text_encoder", "tokenizer", "connectors")
        return f"ltx2/prompt/1 {parts} {dtype} {self.max_prompt_tokens}"

    def prompt_pipeline(self, dtype: torch.dtype, device: torch.device, **settings: Any) -> Any:
        # Without its head, whose logits nobody reads: 262,208 for each token.
        text_encoder = self.load_text_encoders(dtype, device)["text_encoder"].model
        tokenizer = self.load_tokenizer()
        connectors = self.load_component("connectors", dtype).to(device)
        parts = {"text_encoder": text_encoder, "tokenizer": tokenizer, "connectors": connectors}
        return assemble(LTX2Pipeline, **parts, **settings)

    def encode_prompts(
        self, pipeline: Any, prompts: Sequence[Prompt], device: torch.device
    ) -> list[Conditioning]:
        """What each stream reads of the prompts, (L, D) in the dtype of the connectors.

        The pipeline hands its connectors all layers of the text encoder: of 1024 tokens 188,160 numbers each,
        50 times what they make of them. They put registers in the place of padding and mix these with the
        words, so that of theirs nothing may be left out.
        """
        encoded = []
        for prompt in prompts:
            layers_bld, mask, _, _ = pipeline.encode_prompt(
                prompt.text,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_prompt_tokens,
                device=device,
            )
            side = pipeline.tokenizer.padding_side
            *streams_bld, _ = pipeline.connectors(layers_bld, mask, padding_side=side)
            encoded.append({name: rows[0].cpu() for name, rows in zip(STREAMS, streams_bld, strict=True)})
        return encoded

    def prompt_lengths(self, texts: Sequence[str]) -> list[int]:
        return super().prompt_lengths([text.strip() for text in texts])

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        of_clip = f"ltx2/latents/1 {self.folder.fingerprint('vae')} {dtype} {self.image_crf}"
        if self.with_controls:
            of_clip += f" control/1 1/{self.control_downscale}"
        return f"{of_clip} sound/1 {self.folder.fingerprint('audio_vae')}" if self.with_audio else of_clip

    def media_pipeline(self, dtype: torch.dtype, device: torch.device) -> Any:
        pipeline = super().media_pipeline(dtype, device)
        if self.with_controls:  # which other classes would resize by another filter
            pipeline = assemble(LTX2InContextPipeline, vae=pipeline.vae)
        # Encoding asks for it, too. Previews are not decoded so.
        pipeline.vae.use_framewise_decoding = self.vae_tiles is not None
        return pipeline

    def encode_given(self, pipeline: Any, item: Media) -> EncodedMedia:
        start = encode_start(self, pipeline, _with_recompressed_start(item, self.image_crf))
        control = encode_control(self, pipeline, item)
        return {**start, **control, "frame_rate": torch.tensor(item.fps or self.default_fps)}

    def load_media_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Media]], list[EncodedMedia]]:
        encode = super().load_media_encoder(dtype, device)
        if not self.with_audio:
            return encode
        # In fp32 whatever the other is in, as in Lightricks' trainer.
        audio_vae = self.load_component("audio_vae", torch.float32).to(device)

        def encode_with_audio(media: Sequence[Media]) -> list[EncodedMedia]:
            encoded = encode(media)
            if len(media[0].frames) > 1:
                for tensors, latents_clm in zip(encoded, self._encode_audio(audio_vae, media), strict=True):
                    tensors["audio_latents"] = latents_clm
            return encoded

        return encode_with_audio

    def _encode_audio(self, audio_vae: Any, media: Sequence[Media]) -> torch.Tensor:
        """(B, C, L, M), of clips; silence where one has no audio."""
        num_frames, fps = len(media[0].frames), media[0].fps or self.default_fps
        silence = Audio.silent(self.audio_format, num_frames / fps)
        num_latents = num_audio_latents(self._audio_config, num_frames, fps)
        return encode_audio(audio_vae, [item.audio or silence for item in media], num_latents)

    def num_tokens(self, latents_shape: Sequence[int]) -> int:
        is_audio = len(latents_shape) == 3  # (C, L, M), where a clip has (C, F, H, W)
        return latents_shape[1] if is_audio else math.prod(latents_shape[1:])

    def family_shift(self, latents_shape: Sequence[int]) -> float:
        """That of the folder's sampler, which grows with the clip, to the end of its line, as of LTX-Video.

        The sampler itself continues along it (``objective.shift: resolution``). That of LTX-2.5's folder has
        the full model's line, and does not use it.
        """
        if not (self.scheduler_config.get("use_dynamic_shifting") or self._is_2_5):
            return super().family_shift(latents_shape)
        end = math.exp(self.scheduler_config.get("max_shift", 1.15))
        return min(self.resolution_shift(latents_shape), end)

    def example_conditioning(self, latents_shape: Sequence[int]) -> Conditioning:
        config = self.folder.component_config("connectors")
        widths = (
            config[f"{stream}_connector_num_attention_heads"]
            * config[f"{stream}_connector_attention_head_dim"]
            for stream in ("video", "audio")
        )
        prompt = {
            name: torch.ones(self.max_prompt_tokens, width)
            for name, width in zip(STREAMS, widths, strict=True)
        }
        control = {CONTROL: torch.ones(self._control_shape(latents_shape))} if self.with_controls else {}
        return {**prompt, **control, "frame_rate": torch.tensor(self.default_fps)}

    def _control_shape(self, latents_shape: Sequence[int]) -> tuple[int, ...]:
        return control_shape(latents_shape, self.control_downscale)

    def num_condition_values(self, latents_shape: Sequence[int]) -> int:
        return math.prod(self._control_shape(latents_shape)) if self.with_controls else 0

    def num_given_tokens(self, latents_shape: Sequence[int]) -> int:
        return self.num_tokens(self._control_shape(latents_shape)) if self.with_controls else 0

    @property
    def lora_metadata(self) -> Mapping[str, str]:
        return {METADATA: str(self.control_downscale)} if self.with_controls else {}

    def predict(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
    ) -> torch.Tensor:
        velocity, _ = self.predict_with_audio(transformer, noisy_latents, None, sigma, conditioning)
        return velocity

    def predict_with_audio(
        self,
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        noisy_audio_latents: torch.Tensor | None,
        sigma: torch.Tensor,
        conditioning: Sequence[Conditioning],
        *,
        audio_sigma: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``predict``; without audio, None, the estimate of it is of no use."""
        like = device_and_dtype(transformer)
        sigma = sigma * _NUM_TIMESTEPS
        latents_bcfhw, timestep = with_first_frames(noisy_latents, sigma, conditioning)
        audio_parts: dict[str, Any] = {}
        if noisy_audio_latents is not None:
            audio_parts = {
                "audio_latents_bclm": noisy_audio_latents.to(**like),
                "audio_prompt_embeds_bld": stacked(conditioning, STREAMS[1], like),
                "audio_sigma": None if audio_sigma is None else audio_sigma * _NUM_TIMESTEPS,
            }
        return model_fn_ltx2(
            transformer,
            latents_bcfhw.to(**like),
            timestep,
            sigma=sigma,
            **self.model_inputs(conditioning, like),
            **audio_parts,
            **gradient_flags(),
        )

    def model_inputs(self, conditioning: Sequence[Conditioning], like: Mapping[str, Any]) -> dict[str, Any]:
        inputs = {
            "prompt_embeds_bld": stacked(conditioning, STREAMS[0], like),
            "frame_rate": stacked(conditioning, "frame_rate", {"device": like["device"]}),
        }
        if CONTROL not in conditioning[0]:
            return inputs
        control_bcfhw = stacked(conditioning, CONTROL, like)
        return {**inputs, "control_bcfhw": control_bcfhw, "control_downscale": self.control_downscale}

    def sample(
        self, transformer: torch.nn.Module, vae_dtype: torch.dtype, requests: Sequence[PreviewRequest]
    ) -> list[Generated]:
        like = device_and_dtype(transformer)
        audio_parts = {
            name: self.load_component(name, vae_dtype).to(like["device"]) for name in ("audio_vae", "vocoder")
        }
        # The image-to-video pipeline hands images to the VAE in the dtype of the prompt.
        hands = any(self.pipeline_for(request) is LTX2ImageToVideoPipeline for request in requests)
        dtype = like["dtype"] if hands else vae_dtype
        pipeline = self.preview_pipeline(transformer, dtype, **audio_parts)
        return [self.generate(self.made_for(request, pipeline), request) for request in in_turn(requests)]

    def pipeline_for(self, request: PreviewRequest) -> Any:
        if request.control:
            return LTX2InContextPipeline
        return LTX2ImageToVideoPipeline if request.inputs else LTX2Pipeline

    def usage_arguments(self, request: PreviewRequest) -> dict[str, Any]:
        given = control_code(request, self.control_downscale) if request.control else start_code(request)
        return self.sampling(request) | given

    def prompt_argument(self, prompt: Conditioning, like: Mapping[str, Any]) -> dict[str, Any]:
        return prompt_arguments(prompt, like)

    def call_arguments(self, pipeline: Any, request: PreviewRequest) -> dict[str, Any]:
        frame_rate, given = request.fps or self.default_fps, dict[str, Any](preview_start(request))
        # The pipeline knows how images are compressed by its text encoder, which it is made without.
        if request.control:
            given = control_arguments(request, self.control_downscale, self.image_crf)
        elif given:
            given["image_crf"] = self.image_crf
        return {"frame_rate": frame_rate, **given, **self.sampling(request)}

    def generate(self, pipeline: Any, request: PreviewRequest) -> Generated:
        pipeline.connectors = Connected(request.conditioning["prompt_embeds"].shape[-1])
        return super().generate(pipeline, request)

    def generated(self, output: Any, pipeline: Any) -> Generated:
        frames: list[Image.Image] = output.frames[0]
        if not self.with_audio or len(frames) == 1:
            return frames
        rate = pipeline.vocoder.config.output_sampling_rate
        audio = Audio(waveform=output.audio[0].float().cpu(), sample_rate=rate)
        return ClipWithAudio(frames=frames, audio=audio)


def _with_recompressed_start(item: Media, crf: int) -> Media:
    """An item whose first frame, if it names one, is as its pipeline encodes it: out of H.264."""
    if item.first_frame is None:
        return item
    pixels = apply_image_conditioning_crf(np.array(item.first_frame.convert("RGB")), crf)
    return replace(item, first_frame=Image.fromarray(pixels))
