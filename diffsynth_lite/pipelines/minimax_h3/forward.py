"""This file runs MiniMax-H3's transformer on one sequence: prompt, audio and clip.

Layouts: b batch, c latent channels, f latent frames, h and w latent height and width; l tokens, d channels;
k the two channels of stereo audio. Sources: diffusers ``transformer_minimax_h3.py``, ``before_denoise.py``
and ``decoders.py`` in its ``modular_pipelines/minimax_h3``.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from diffusers import MiniMaxH3ModularPipeline
from diffusers.modular_pipelines.minimax_h3.before_denoise import (
    MiniMaxH3PrepareLayoutStep,
    patchify_video_latents,
)

from diffsynth_lite.core.gradient import checkpoint_blocks, gradient_checkpoint_forward, unwrapped
from diffsynth_lite.pipelines.base.model_function import Checkpointing, model_function

RULES = MiniMaxH3ModularPipeline()
"""The numbers that its blocks read of the pipeline."""
BLOCK_LISTS = ("token_refiner.refiner_blocks", "transformer_blocks")
UNUSED_MATMULS = ("ff.net.2",)
_INDICES = ("video_indices", "audio_indices", "text_indices")


@model_function
def model_fn_minimax_h3(
    transformer: torch.nn.Module,
    latents: Sequence[torch.Tensor],
    timesteps: Sequence[torch.Tensor],
    prompt_embeds_bld: torch.Tensor,
    **checkpointing: Unpack[Checkpointing],
) -> list[torch.Tensor]:
    """One forward of MiniMax-H3, each transformer block run by the gradient engine.

    All samples have prompts of one length and are at the same noise level: the model takes one of each.

    Args:
        transformer: a ``MiniMaxH3Transformer3DModel``, plain or wrapped by DDP.
        latents: noisy normalised latents of clips, (B, 24, F, H, W), H and W even; and, of clips with audio,
            those of the audio, (B, 2, 32, L). Without it there is none in the sequence.
        timesteps: of each of these (1,), in [0, 1], where 1 is clean; prompts have that of the clips.
        prompt_embeds_bld: (B, L, 5120).

    Returns:
        Each in the shape of ``latents``, the predicted velocity ``latents - noise``.
    """
    config: Any = unwrapped(transformer).config
    clips_bcfhw, *audio = latents
    batch, channels, *sides = clips_bcfhw.shape
    audio_bkcl = audio[0] if audio else clips_bcfhw.new_zeros(batch, 2, config.audio_in_channels, 0)
    places, tags, *indices, _, _ = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
        torch.full(prompt_embeds_bld.shape[1:2], RULES.text_tag),
        *sides,
        audio_bkcl.shape[-1],
        tuple(config.patch_size),
        RULES.audio_channels,
        RULES.audio_tag,
        RULES.video_tag,
    )
    names = ("position_ids", "token_tags", "timestep_indices", *_INDICES)
    layout = zip(names, (places.float(), tags, (tags == RULES.audio_tag).long(), *indices), strict=True)
    with checkpoint_blocks(
        transformer, BLOCK_LISTS, gradient_checkpoint_forward, unused_matmuls=UNUSED_MATMULS, **checkpointing
    ):
        clips_bld, audio_bld = transformer(
            hidden_states=patchify_video_latents(clips_bcfhw, config.patch_size).view(
                batch, -1, channels * 4
            ),
            audio_hidden_states=audio_bkcl.transpose(2, 3).flatten(1, 2),
            encoder_hidden_states=prompt_embeds_bld,
            timestep=torch.cat(list(timesteps)),
            **{name: value.to(clips_bcfhw.device) for name, value in layout},
            return_dict=False,
        )
    predicted = [_unpatched(clips_bld, clips_bcfhw)]
    return predicted + [audio_bld.unflatten(1, (2, -1)).transpose(2, 3)] * len(audio)


def _unpatched(tokens_bld: torch.Tensor, like_bcfhw: torch.Tensor) -> torch.Tensor:
    """Tokens of squares of 2 x 2 latents, as latents of the shape of others."""
    batch, channels, num_frames, height, width = like_bcfhw.shape
    squares = tokens_bld.view(batch, num_frames, height // 2, width // 2, channels, 2, 2)
    return squares.permute(0, 4, 1, 2, 5, 3, 6).reshape(like_bcfhw.shape)
