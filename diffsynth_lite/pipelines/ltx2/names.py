"""This file lists the layers of LTX-2 that a LoRA may be on, and what else files call them.

Sources: the modules of diffusers' model and its ``scripts/convert_ltx2_to_diffusers.py``, which has the names
of Lightricks' repository; ``comfy/ldm/lightricks/av_model.py`` of ComfyUI, which has these, too.
"""

from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers
from diffsynth_lite.lora.spelling import Spelling

LTX2_NAMES = Spelling(
    prefixes={"transformer": "diffusion_model"},
    renames=(
        ("proj_in", "patchify_proj"),
        ("audio_proj_in", "audio_patchify_proj"),
        ("time_embed", "adaln_single"),
        ("audio_time_embed", "audio_adaln_single"),
        ("prompt_adaln", "prompt_adaln_single"),
        ("audio_prompt_adaln", "audio_prompt_adaln_single"),
        ("av_cross_attn_video_scale_shift", "av_ca_video_scale_shift_adaln_single"),
        ("av_cross_attn_audio_scale_shift", "av_ca_audio_scale_shift_adaln_single"),
        ("av_cross_attn_video_a2v_gate", "av_ca_a2v_gate_adaln_single"),
        ("av_cross_attn_audio_v2a_gate", "av_ca_v2a_gate_adaln_single"),
    ),
    unknown_to_comfyui=(),
)
"""The names of the models' own repository, which ComfyUI has, too."""

_BLOCK = "transformer_blocks.*"
_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0", "to_gate_logits")
_NORMS = ("time_embed", "audio_time_embed", "prompt_adaln", "audio_prompt_adaln")
_BETWEEN = (
    *("av_cross_attn_video_scale_shift", "av_cross_attn_audio_scale_shift"),
    *("av_cross_attn_video_a2v_gate", "av_cross_attn_audio_v2a_gate"),
)
_TWO = ("linear_1", "linear_2")
_OUTSIDE = (
    *(f"{norm}.emb.timestep_embedder.{layer}" for norm in (*_NORMS, *_BETWEEN) for layer in _TWO),
    *(f"{norm}.linear" for norm in (*_NORMS, *_BETWEEN)),
    *(f"{part}.{layer}" for part in ("caption_projection", "audio_caption_projection") for layer in _TWO),
    *("proj_in", "audio_proj_in", "proj_out", "audio_proj_out"),
)

LTX2_LAYERS: LoraLayers = {
    "transformer": LayerNames.spelled(
        LTX2_NAMES,
        (
            *(f"{_BLOCK}.{attention}.{layer}" for attention in _ATTENTIONS for layer in _PROJECTIONS),
            *(f"{_BLOCK}.{ff}.net.{layer}" for ff in ("ff", "audio_ff") for layer in ("0.proj", "2")),
            *_OUTSIDE,
        ),
    )
}
