"""This file makes of audio what LTX-2 is trained on: latents of its autoencoder for log-mel spectrograms.

diffusers 0.42.1 decodes audio and has no way to its spectrogram: none of its pipelines encodes any.

Layouts: b batch, c channels, s samples, t frames of the spectrogram, m mel bands; l latents.
Sources: ``AudioProcessor``, ``encode_audio`` and, for ``n_fft``, ``AudioEncoder`` of Lightricks' ltx-core;
packing and statistics from diffusers ``pipeline_ltx2.py``.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from diffusers import LTX2Pipeline
from transformers.audio_utils import mel_filter_bank

from diffsynth_lite.errors import UserError
from diffsynth_lite.media import Audio

N_FFT = 1024
"""Samples of a window, in ltx-core; the settings of diffusers' autoencoder leave it out."""
_SMALLEST = 1e-5
"""Of a band, before the logarithm."""


def log_mel(waveform_bcs: torch.Tensor, *, sample_rate: int, hop_length: int, num_bands: int) -> torch.Tensor:
    """Natural logarithm of the mel spectrogram: of magnitudes, on Slaney's scale, bands of equal area.

    Args:
        waveform_bcs: (B, C, S), in [-1, 1], fp32, more than 512 samples.
        hop_length: samples from one frame to the next.

    Returns:
        (B, C, S // hop_length + 1, num_bands); frames are centred, the edges mirrored.
    """
    window = torch.hann_window(N_FFT, device=waveform_bcs.device)
    spectrum = torch.stft(
        waveform_bcs.flatten(0, 1), N_FFT, hop_length, window=window, center=True, return_complex=True
    )
    filters = _filters(sample_rate, num_bands).to(waveform_bcs.device)
    mel_xtm = spectrum.abs().transpose(1, 2) @ filters
    return mel_xtm.clamp(min=_SMALLEST).log().view(*waveform_bcs.shape[:2], -1, num_bands)


@cache
def _filters(sample_rate: int, num_bands: int) -> torch.Tensor:
    """(N_FFT / 2 + 1, num_bands)."""
    bank = mel_filter_bank(
        num_frequency_bins=N_FFT // 2 + 1,
        num_mel_filters=num_bands,
        min_frequency=0.0,
        max_frequency=sample_rate / 2,
        sampling_rate=sample_rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(bank).float()


def num_audio_latents(audio_config: Any, num_frames: int, fps: float) -> int:
    """As many as the pipeline draws with a clip: 25 a second."""
    rate, hop_length = audio_config["sample_rate"], audio_config["mel_hop_length"]
    if round(num_frames / fps * rate) <= N_FFT // 2:
        raise UserError(
            f"data.fps: {fps:g}: clips of {num_frames} frames last {num_frames / fps:.3f} s, too short for a "
            "spectrogram of their audio; set fewer frames a second, or data.audio: false"
        )
    a_second: float = rate / hop_length / COMPRESSION
    return round(num_frames / fps * a_second)


COMPRESSION = 4
"""Frames of the spectrogram to a latent, and mel bands; a literal in diffusers' autoencoder."""


@torch.no_grad()
def encode_audio(audio_vae: Any, audio: Sequence[Audio], num_latents: int) -> torch.Tensor:
    """Normalised latents of audio, (B, C, L, M) in fp32, on the CPU.

    Args:
        audio_vae: an ``AutoencoderKLLTX2Audio``, in fp32.
        audio: in the VAE's rate and channels, all of one length.
        num_latents: L. The autoencoder may make one more, of a part of a latent at the end.
    """
    config = audio_vae.config
    waveform_bcs = torch.stack([one.waveform for one in audio]).to(audio_vae.device)
    mel_bctm = log_mel(
        waveform_bcs,
        sample_rate=config.sample_rate,
        hop_length=config.mel_hop_length,
        num_bands=config.mel_bins,
    )
    latents_bclm = audio_vae.encode(mel_bctm).latent_dist.mode()[:, :, :num_latents]
    packed_bld = LTX2Pipeline._normalize_audio_latents(
        LTX2Pipeline._pack_audio_latents(latents_bclm), audio_vae.latents_mean, audio_vae.latents_std
    )
    return unpacked(packed_bld, latents_bclm).cpu()


def unpacked(tokens_bld: torch.Tensor, like_bclm: torch.Tensor) -> torch.Tensor:
    """Tokens of audio, (B, L, C * M), as latents of the shape of others, (B, C, L, M)."""
    _, _, length, bands = like_bclm.shape
    latents_bclm: torch.Tensor = LTX2Pipeline._unpack_audio_latents(tokens_bld, length, num_mel_bins=bands)
    return latents_bclm
