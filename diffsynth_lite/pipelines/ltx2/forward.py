"""This file runs LTX-2's transformer: the stream of clips, and that of their audio.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels; m
bins of the mel spectrogram. Source: diffusers ``transformer_ltx2.py``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Unpack

import torch
from diffusers import LTX2Pipeline

from diffsynth_lite.core.gradient import checkpoint_blocks, gradient_checkpoint_forward, unwrapped
from diffsynth_lite.pipelines.base.model_function import Checkpointing, model_function
from diffsynth_lite.pipelines.ltx2.audio import unpacked

BLOCK_LISTS = ("transformer_blocks",)
UNUSED_MATMULS = ("ff.net.2",)


@model_function
def model_fn_ltx2(
    transformer: torch.nn.Module,
    latents_bcfhw: torch.Tensor,
    timestep: torch.Tensor,
    prompt_embeds_bld: torch.Tensor,
    prompt_embeds_mask: torch.Tensor | None = None,
    *,
    sigma: torch.Tensor,
    frame_rate: torch.Tensor,
    audio_latents_bclm: torch.Tensor | None = None,
    audio_prompt_embeds_bld: torch.Tensor | None = None,
    audio_sigma: torch.Tensor | None = None,
    control_bcfhw: torch.Tensor | None = None,
    control_downscale: int = 1,
    **checkpointing: Unpack[Checkpointing],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward of LTX-2, each transformer block run by the gradient engine.

    Without audio the model's two streams are kept separate (``isolate_modalities``). That of the audio is run
    all the same, and gets one token of zeros.

    Args:
        transformer: a ``LTX2VideoTransformer3DModel``, plain or wrapped by DDP.
        latents_bcfhw: (B, 128, F, H, W), noisy normalised latents.
        timestep: (B,), or (B, F * H * W) with one for each token, in [0, 1000].
        prompt_embeds_bld: (B, L, D), what the connectors make of prompts for the stream of clips.
        prompt_embeds_mask: (B, L), 1 for a token and 0 for what is hidden; None hides nothing.
        sigma: (B,), in [0, 1000]: that of the noisy tokens, by which LTX-2.3 reads the prompt.
        frame_rate: (B,), frames per second of the clips: positions in time are in seconds.
        audio_latents_bclm: (B, 8, L, 16), noisy normalised latents of their audio.
        audio_sigma: (B,), as ``sigma``, that of these; None where it is the same.
        audio_prompt_embeds_bld: (B, L, D), what the connectors make of prompts for the stream of audio; with
            the mask of the others.
        control_bcfhw: (B, 128, F, h, w), normalised latents of clips that the noisy ones follow: clean, at
            timestep 0, and after the noisy ones in the sequence.
        control_downscale: H / h, and W / w: their positions are spread by it over the noisy clip.

    Returns:
        (B, 128, F, H, W), and that of the audio, (B, 8, L, 16), of no use without audio: each the predicted
        velocity ``noise - latents``.
    """
    num_frames, height, width = latents_bcfhw.shape[2:]
    hears = audio_latents_bclm is not None
    if audio_latents_bclm is None or audio_prompt_embeds_bld is None:
        audio_latents_bclm, audio_prompt_embeds_bld = _without_audio(transformer, latents_bcfhw)
    tokens_bld = LTX2Pipeline._pack_latents(latents_bcfhw)
    # Axes as diffusers divides by them: (B, L, 2), start and end of each token.
    fps, num_tokens = frame_rate[:, None, None], tokens_bld.shape[1]
    video = {"hidden_states": tokens_bld, "timestep": timestep}
    if control_bcfhw is not None:
        positions = [
            _positions(transformer, latents_bcfhw, fps),
            _positions(transformer, control_bcfhw, fps, control_downscale),
        ]
        video = _followed_by(video, LTX2Pipeline._pack_latents(control_bcfhw))
        video["video_coords"] = torch.cat(positions, dim=2)
    with (
        nullcontext() if audio_sigma is None else _gates_of_the_other(transformer, sigma, audio_sigma),
        checkpoint_blocks(
            transformer,
            BLOCK_LISTS,
            gradient_checkpoint_forward,
            unused_matmuls=(*UNUSED_MATMULS, *(["audio_ff.net.2"] if hears else [])),
            **checkpointing,
        ),
    ):
        velocity_bld, audio_velocity_bld = transformer(
            **video,
            audio_hidden_states=LTX2Pipeline._pack_audio_latents(audio_latents_bclm),
            encoder_hidden_states=prompt_embeds_bld,
            audio_encoder_hidden_states=audio_prompt_embeds_bld,
            audio_timestep=sigma if audio_sigma is None else audio_sigma,
            sigma=sigma,
            audio_sigma=audio_sigma,
            encoder_attention_mask=prompt_embeds_mask,
            audio_encoder_attention_mask=prompt_embeds_mask if hears else None,
            num_frames=num_frames,
            height=height,
            width=width,
            fps=fps,
            audio_num_frames=audio_latents_bclm.shape[2],
            isolate_modalities=not hears,
            use_cross_timestep=audio_sigma is None,
            return_dict=False,
        )
    velocity_bcfhw: torch.Tensor = LTX2Pipeline._unpack_latents(
        velocity_bld[:, :num_tokens], num_frames, height, width
    )
    return velocity_bcfhw, unpacked(audio_velocity_bld, audio_latents_bclm)


def _followed_by(video: Mapping[str, torch.Tensor], control_bld: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tokens of noisy clips and their timesteps, with clean tokens after them, at timestep 0."""
    tokens_bld, timestep = video["hidden_states"], video["timestep"]
    timestep_bl = timestep.view(len(timestep), -1).expand(-1, tokens_bld.shape[1])
    clean_bl = timestep.new_zeros(control_bld.shape[:2])
    return {
        "hidden_states": torch.cat([tokens_bld, control_bld], dim=1),
        "timestep": torch.cat([timestep_bl, clean_bl], dim=1),
    }


def _positions(
    transformer: torch.nn.Module, latents_bcfhw: torch.Tensor, fps: torch.Tensor, downscale: int = 1
) -> torch.Tensor:
    """Seconds and pixels at which each token starts and ends, (B, 3, L, 2), also of a smaller clip.

    Args:
        fps: (B, 1, 1).
        downscale: pixels of a whole clip to one of these, on each axis.
    """
    model: Any = unwrapped(transformer)
    batch, _, *sides = latents_bcfhw.shape
    coords: torch.Tensor = model.rope.prepare_video_coords(batch, *sides, latents_bcfhw.device, fps=fps)
    coords[:, 1:] *= downscale
    return coords


@contextmanager
def _gates_of_the_other(
    transformer: torch.nn.Module, sigma: torch.Tensor, audio_sigma: torch.Tensor
) -> Iterator[None]:
    """A scope in which what a stream takes from the other is gated by the other's noise level.

    ltx-core (``_prepare_cross_attention_timestep`` in ``transformer_args.py``, since 203d484) scales and
    shifts by the stream's own level, and gates by the other's. diffusers 0.42.1 has one level for both: the
    stream's own, or the other's (``use_cross_timestep``).

    Args:
        sigma: (B,), in [0, 1000], of the clips; ``audio_sigma`` is that of their audio.
    """
    model: Any = unwrapped(transformer)
    factor = model.config.cross_attn_timestep_scale_multiplier / model.config.timestep_scale_multiplier
    gates = {model.av_cross_attn_video_a2v_gate: audio_sigma, model.av_cross_attn_audio_v2a_gate: sigma}
    hooks = [
        gate.register_forward_pre_hook(lambda _gate, _given, level=level: level * factor)
        for gate, level in gates.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _without_audio(
    transformer: torch.nn.Module, like_bcfhw: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the stream of audio is given where there is none: one token, (B, C, 1, 1), and one of a prompt."""
    config: Any = unwrapped(transformer).config
    reads = config.caption_channels if config.use_prompt_embeddings else config.audio_cross_attention_dim
    batch = len(like_bcfhw)
    return like_bcfhw.new_zeros(batch, config.audio_in_channels, 1, 1), like_bcfhw.new_zeros(batch, 1, reads)
