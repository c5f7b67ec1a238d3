"""This file makes LTX-Video sing, for tests: audio in the data, the trainer and the previews.

Latents of the audio are pieces of its waveform, which the same transformer sees as a clip of one pixel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from diffsynth_lite.media import Audio, AudioFormat, ClipWithAudio, Generated, Media
from diffsynth_lite.pipelines import Conditioning, EncodedMedia, PreviewRequest, WithAudio
from diffsynth_lite.pipelines.ltx_video import LTXVideo
from diffsynth_lite.pipelines.ltx_video import tiny as tiny_ltx_video

_PIECES_A_SECOND = 25
_SAMPLES_A_PIECE = 64  # of each of two channels: 128 numbers, as many as LTX-Video's latents have channels


class Singing(WithAudio, LTXVideo):
    """LTX-Video with audio."""

    pipelines = LTXVideo.pipelines
    audio_format = AudioFormat(sample_rate=_PIECES_A_SECOND * _SAMPLES_A_PIECE, num_channels=2)
    splits_batches = True

    def audio_latents_shape(self, num_frames: int, fps: float) -> tuple[int, ...] | None:
        if num_frames == 1:
            return None
        return 2 * _SAMPLES_A_PIECE, round(num_frames / fps * _PIECES_A_SECOND), 1, 1

    def media_encoder_id(self, dtype: torch.dtype) -> str:
        return super().media_encoder_id(dtype) + (" with sound/1" if self.with_audio else "")

    def load_media_encoder(
        self, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Sequence[Media]], list[EncodedMedia]]:
        encode_clips = super().load_media_encoder(dtype, device)

        def encode(media: Sequence[Media]) -> list[EncodedMedia]:
            encoded = encode_clips(media)
            for item, tensors in zip(media, encoded, strict=True):
                if self.with_audio and len(item.frames) > 1:
                    tensors["audio_latents"] = self._encoded(item)
            return encoded

        return encode

    def _encoded(self, media: Media) -> torch.Tensor:
        fps = media.fps or self.default_fps
        shape = self.audio_latents_shape(len(media.frames), fps)
        audio = media.audio or Audio.silent(self.audio_format, shape[1] / _PIECES_A_SECOND)
        assert audio.sample_rate == self.audio_format.sample_rate
        pieces = audio.waveform.unflatten(1, (shape[1], _SAMPLES_A_PIECE))  # (2, L, samples)
        return pieces.transpose(1, 2).reshape(shape)

    def _decoded(self, latents: torch.Tensor) -> Audio:
        waveform = latents.reshape(2, _SAMPLES_A_PIECE, -1).transpose(1, 2).flatten(1)
        return Audio(waveform=waveform.contiguous(), sample_rate=self.audio_format.sample_rate)

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
        video = self.predict(transformer, noisy_latents, sigma, conditioning)
        level = sigma if audio_sigma is None else audio_sigma
        inputs = [{name: sample[name] for name in ("prompt_embeds", "frame_rate")} for sample in conditioning]
        return video, self.predict(transformer, noisy_audio_latents, level, inputs)

    @torch.no_grad()
    def sample(
        self, transformer: torch.nn.Module, vae_dtype: torch.dtype, requests: Sequence[PreviewRequest]
    ) -> Sequence[Generated]:
        drawn = super().sample(transformer, vae_dtype, requests)
        if not self.with_audio or requests[0].num_frames == 1:
            return drawn
        return [
            ClipWithAudio(frames=frames, audio=self._sung(transformer, request))
            for frames, request in zip(drawn, requests, strict=True)
        ]

    def _sung(self, transformer: torch.nn.Module, request: PreviewRequest) -> Audio:
        """In one step."""
        shape = self.audio_latents_shape(request.num_frames, request.fps)
        noise = torch.randn(1, *shape, generator=torch.Generator().manual_seed(request.seed))
        inputs = request.conditioning | {"frame_rate": torch.tensor(request.fps)}
        estimate = self.predict(transformer, noise, torch.ones(1), [inputs])
        return self._decoded((noise - estimate.float().cpu())[0].clamp(-1, 1))


def tiny() -> Any:
    """LTX-Video's."""
    return tiny_ltx_video()
