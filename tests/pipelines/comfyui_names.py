"""What ComfyUI takes in LoRA files, as it was read there, and what it makes of one.

Sources, of github.com/Comfy-Org/ComfyUI: ``model_lora_keys_unet``, ``model_lora_keys_clip`` and ``load_lora``
in ``comfy/lora.py`` (commit 17358c8f73b5); ``flux_to_diffusers``, ``z_image_to_diffusers`` and
``unet_to_diffusers`` in ``comfy/utils.py`` (09708eae709a); ``mmdit_to_diffusers`` there, ``LoRAAdapter`` in
``comfy/weight_adapter/lora.py``; ``krea2_to_diffusers`` in the copy of ``comfy/utils.py`` that Forge Neo
keeps (``huggingface_guess``); and the modules of ``comfy/ldm/qwen_image/model.py``,
``comfy/ldm/wan/model.py`` and ``comfy/ldm/lightricks/model.py`` (a125cd84b054) and of
``comfy/ldm/hunyuan_video/model.py`` and ``comfy/ldm/ideogram4/model.py`` (8d534945ebd5). Only linear layers
are listed. A ``*`` is any number. The modules of Qwen-Image 2.1 are those of
``comfy/ldm/qwen_image21/model.py`` (08f68f0919d2), of whose fused layer ComfyUI takes the parts.
Anima's are those of ``comfy/ldm/anima/model.py`` (10ca04d5365f) and ``comfy/ldm/cosmos/predict2.py``,
which it is made from. ERNIE-Image's are those of ``comfy/ldm/ernie/model.py`` as a public copy of it
had them in 2026; for any model ComfyUI takes ``diffusion_model.`` before their names. CogVideoX's are
those of ``comfy/ldm/cogvideo/model.py`` (955ce480e272), Lumina 2's those of ``comfy/ldm/lumina/model.py``,
MiniMax-H3's those of ``comfy/ldm/minimax/model.py`` (003617c441f2), and Kandinsky 5's those of
``comfy/ldm/kandinsky5/model.py`` (0c84b7650fca).
HiDream-I1 has diffusers' names in ``comfy/ldm/hidream/model.py`` (a125cd84b054), too.
LongCat-Image is a FLUX.1 in ``comfy/model_base.py`` (094c74c1b7f9), but what embeds its noise level has
another name in diffusers. AuraFlow's names are those of ``auraflow_to_diffusers`` in
``comfy/utils.py``.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import load_file

from diffsynth_lite.lora.updates import LoraPair

_ENDINGS = ((".lora_down.weight", ".lora_up.weight"), (".lora_A.weight", ".lora_B.weight"))
_JOINT_ATTENTION = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
)
_PLAIN_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_UNET_BLOCK = tuple(f"{part}.{name}" for part in ("attn1", "attn2") for name in _PLAIN_ATTENTION)


def _in(beginning: str, *endings: str) -> tuple[str, ...]:
    return tuple(f"{beginning}.{ending}" for ending in endings)


_FLUX = (
    *_in("transformer_blocks.*", *_JOINT_ATTENTION, "norm1.linear", "norm1_context.linear"),
    *_in("transformer_blocks.*.ff", "net.0.proj", "net.2", "linear_in", "linear_out"),
    *_in("transformer_blocks.*.ff_context", "net.0.proj", "net.2", "linear_in", "linear_out"),
    *_in("single_transformer_blocks.*.attn", "to_q", "to_k", "to_v", "to_qkv_mlp_proj", "to_out"),
    *_in("single_transformer_blocks.*", "norm.linear", "proj_mlp", "proj_out"),
    *_in("time_text_embed.timestep_embedder", "linear_1", "linear_2"),
    *_in("time_text_embed.text_embedder", "linear_1", "linear_2"),
    *_in("time_text_embed.guidance_embedder", "linear_1", "linear_2"),
    *("x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
)
_LONGCAT_IMAGE = tuple(f"transformer.{name}" for name in _FLUX if not name.startswith("time_text_embed."))
_QWEN_IMAGE = (
    *_in("transformer_blocks.*", *_JOINT_ATTENTION, "img_mod.1", "txt_mod.1"),
    *_in("transformer_blocks.*.img_mlp.net", "0.proj", "2"),
    *_in("transformer_blocks.*.txt_mlp.net", "0.proj", "2"),
    *_in("time_text_embed.timestep_embedder", "linear_1", "linear_2"),
    *("img_in", "txt_in", "norm_out.linear", "proj_out"),
)
_KANDINSKY5_ATTENTION = ("to_query", "to_key", "to_value", "out_layer")
_KANDINSKY5_FEED_FORWARD = ("feed_forward.in_layer", "feed_forward.out_layer")
_KANDINSKY5 = (
    *_in("text_transformer_blocks.*.self_attention", *_KANDINSKY5_ATTENTION),
    *_in("text_transformer_blocks.*", "text_modulation.out_layer", *_KANDINSKY5_FEED_FORWARD),
    *_in("visual_transformer_blocks.*.self_attention", *_KANDINSKY5_ATTENTION),
    *_in("visual_transformer_blocks.*.cross_attention", *_KANDINSKY5_ATTENTION),
    *_in("visual_transformer_blocks.*", "visual_modulation.out_layer", *_KANDINSKY5_FEED_FORWARD),
    *_in("time_embeddings", "in_layer", "out_layer"),
    *(f"{part}_embeddings.in_layer" for part in ("text", "pooled_text", "visual")),
    *("out_layer.modulation.out_layer", "out_layer.out_layer"),
)
_QWEN_IMAGE_21 = (
    *_in("transformer_blocks.*.attn", *_PLAIN_ATTENTION),
    *_in("transformer_blocks.*.img_mlp", "gate_layer", "proj", "out"),
    *_in("time_text_embed.timestep_embedder", "linear_1", "linear_2"),
    *_in("txt_in", "in_layer", "out_layer"),
    *("img_in", "modulation.1", "norm_out.linear", "proj_out"),
)
_ANIMA = (
    *(
        name
        for attention in ("self_attn", "cross_attn")
        for name in _in(f"blocks.*.{attention}", "q_proj", "k_proj", "v_proj", "output_proj")
    ),
    *_in("blocks.*.mlp", "layer1", "layer2"),
    *(
        name
        for part in ("self_attn", "cross_attn", "mlp")
        for name in _in(f"blocks.*.adaln_modulation_{part}", "1", "2")
    ),
    *_in("final_layer", "linear", "adaln_modulation.1", "adaln_modulation.2"),
    *("x_embedder.proj.1", "t_embedder.1.linear_1", "t_embedder.1.linear_2"),
)
_KREA2 = (
    *(
        name
        for blocks in ("transformer_blocks.*", *_in("text_fusion", "layerwise_blocks.*", "refiner_blocks.*"))
        for name in (
            *_in(f"{blocks}.attn", *_PLAIN_ATTENTION, "to_gate"),
            *_in(f"{blocks}.ff", "gate", "up", "down"),
        )
    ),
    *_in("time_embed", "linear_1", "linear_2"),
    *_in("txt_in", "linear_1", "linear_2"),
    *("img_in", "time_mod_proj", "text_fusion.projector", "final_layer.linear"),
)
_HIDREAM = (
    *(
        f"{blocks}_stream_blocks.*.block.{name}"
        for blocks in ("double", "single")
        for name in (
            *_in("attn1", *(f"to_{part}{side}" for part in ("q", "k", "v", "out") for side in ("", "_t"))),
            *_in("ff_i.shared_experts", "w1", "w2", "w3"),
            *_in("ff_i.experts.*", "w1", "w2", "w3"),
            *_in("ff_t", "w1", "w2", "w3"),
            "adaLN_modulation.1",
        )
    ),
    *_in("t_embedder.timestep_embedder", "linear_1", "linear_2"),
    *_in("p_embedder.pooled_embedder", "linear_1", "linear_2"),
    *(
        "x_embedder.proj",
        "caption_projection.*.linear",
        "final_layer.linear",
        "final_layer.adaLN_modulation.1",
    ),
)
_Z_IMAGE = (
    *(
        name
        for blocks in ("layers.*", "context_refiner.*", "noise_refiner.*")
        for name in (
            *_in(f"{blocks}.attention", *_PLAIN_ATTENTION),
            *_in(f"{blocks}.feed_forward", "w1", "w2", "w3"),
        )
    ),
    *_in("layers.*", "adaLN_modulation.0"),
    *_in("noise_refiner.*", "adaLN_modulation.0"),
    *_in("all_final_layer.2-1", "linear", "adaLN_modulation.1"),
    *("all_x_embedder.2-1", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2"),
)
_ERNIE_IMAGE = (
    *_in("layers.*.self_attention", *_PLAIN_ATTENTION),
    *_in("layers.*.mlp", "gate_proj", "up_proj", "linear_fc2"),
    *_in("time_embedding", "linear_1", "linear_2"),
    *("text_proj", "adaLN_modulation.1", "final_norm.linear", "final_linear"),
)
_SD3 = (
    *_in("transformer_blocks.*", *_JOINT_ATTENTION, "norm1.linear", "norm1_context.linear"),
    *_in("transformer_blocks.*.attn2", *_PLAIN_ATTENTION),
    *_in("transformer_blocks.*.ff.net", "0.proj", "2"),
    *_in("transformer_blocks.*.ff_context.net", "0.proj", "2"),
    *_in("time_text_embed.timestep_embedder", "linear_1", "linear_2"),
    *_in("time_text_embed.text_embedder", "linear_1", "linear_2"),
    *("context_embedder", "norm_out.linear", "proj_out"),
)
_AURA_FLOW_FEED_FORWARD = ("linear_1", "linear_2", "out_projection")
_AURA_FLOW = (
    *_in("joint_transformer_blocks.*", *_JOINT_ATTENTION, "norm1.linear", "norm1_context.linear"),
    *_in("joint_transformer_blocks.*.ff", *_AURA_FLOW_FEED_FORWARD),
    *_in("joint_transformer_blocks.*.ff_context", *_AURA_FLOW_FEED_FORWARD),
    *_in("single_transformer_blocks.*.attn", *_PLAIN_ATTENTION),
    *_in("single_transformer_blocks.*.ff", *_AURA_FLOW_FEED_FORWARD),
    *_in("single_transformer_blocks.*", "norm1.linear"),
    *_in("time_step_proj", "linear_1", "linear_2"),
    *("context_embedder", "pos_embed.proj", "norm_out.linear", "proj_out"),
)
_WAN = (
    *_in("blocks.*.self_attn", "q", "k", "v", "o"),
    *_in("blocks.*.cross_attn", "q", "k", "v", "o", "k_img", "v_img"),
    *_in("blocks.*.ffn", "0", "2"),
    *("text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2", "time_projection.1"),
    *("img_emb.proj.1", "img_emb.proj.3", "head.head"),
)
_LTX_VIDEO = (
    *_in("transformer_blocks.*.attn1", *_PLAIN_ATTENTION),
    *_in("transformer_blocks.*.attn2", *_PLAIN_ATTENTION),
    *_in("transformer_blocks.*.ff.net", "0.proj", "2"),
    *_in("adaln_single.emb.timestep_embedder", "linear_1", "linear_2"),
    *_in("caption_projection", "linear_1", "linear_2"),
    *("adaln_single.linear", "patchify_proj", "proj_out"),
)
_LTX2 = (
    *(
        name
        for attention in ("attn1", "attn2", "audio_to_video_attn", "video_to_audio_attn")
        for of_stream in (("", "audio_") if attention.startswith("attn") else ("",))
        for name in _in(f"transformer_blocks.*.{of_stream}{attention}", *_PLAIN_ATTENTION, "to_gate_logits")
    ),
    *_in("transformer_blocks.*.ff.net", "0.proj", "2"),
    *_in("transformer_blocks.*.audio_ff.net", "0.proj", "2"),
    *(
        name
        for norm in (
            *("adaln_single", "audio_adaln_single", "prompt_adaln_single", "audio_prompt_adaln_single"),
            *("av_ca_video_scale_shift_adaln_single", "av_ca_audio_scale_shift_adaln_single"),
            *("av_ca_a2v_gate_adaln_single", "av_ca_v2a_gate_adaln_single"),
        )
        for name in _in(norm, "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2", "linear")
    ),
    *_in("caption_projection", "linear_1", "linear_2"),
    *_in("audio_caption_projection", "linear_1", "linear_2"),
    *("patchify_proj", "audio_patchify_proj", "proj_out", "audio_proj_out"),
)
_UNET = (
    *(
        name
        for place in ("down_blocks.*.attentions.*", "mid_block.attentions.*", "up_blocks.*.attentions.*")
        for name in (
            *_in(place, "proj_in", "proj_out"),
            *_in(f"{place}.transformer_blocks.*", *_UNET_BLOCK, "ff.net.0.proj", "ff.net.2"),
        )
    ),
    *_in("down_blocks.*.resnets.*", "time_emb_proj"),
    *_in("mid_block.resnets.*", "time_emb_proj"),
    *_in("up_blocks.*.resnets.*", "time_emb_proj"),
    *("time_embedding.linear_1", "time_embedding.linear_2", "label_emb.0.0", "label_emb.0.2"),
)
_CLIP = (
    *_in("text_model.encoder.layers.*.self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
    *_in("text_model.encoder.layers.*.mlp", "fc1", "fc2"),
    "text_projection",
)


def _flat(prefix: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_{name.replace('.', '_')}" for name in names)


HUNYUAN_VIDEO_15 = _flat(
    "lora_unet",
    *_in("double_blocks.*.img_attn", "qkv", "proj"),
    *_in("double_blocks.*.txt_attn", "qkv", "proj"),
    *_in("double_blocks.*.img_mlp", "0", "2"),
    *_in("double_blocks.*.txt_mlp", "0", "2"),
    *_in("double_blocks.*", "img_mod.lin", "txt_mod.lin"),
)
"""Layers of the blocks of this model, of which ComfyUI has several as one."""

HUNYUAN_VIDEO = (
    *HUNYUAN_VIDEO_15,
    *_flat("lora_unet", *_in("single_blocks.*", "linear1", "linear2", "modulation.lin")),
)
"""Also of the first version."""

COGVIDEOX = _in(
    "diffusion_model",
    *_in("blocks.*", "q", "k", "v", "attn_out", "ff_proj", "ff_out", "norm1.linear", "norm2.linear"),
    *("time_embedding_linear_1", "time_embedding_linear_2"),
    *("patch_embed.proj", "patch_embed.text_proj", "norm_out.linear", "proj_out"),
)
"""Of CogVideoX, by names that diffusers does not take."""

WAN_VACE = _in(
    "diffusion_model",
    *_WAN,
    *(f"vace_{name}" for name in _WAN if name.startswith("blocks.*")),
    *_in("vace_blocks.*", "before_proj", "after_proj"),
)
"""Of Wan VACE, by names that diffusers does not take."""

IDEOGRAM4 = _flat(
    "lora_unet",
    *_in("layers.*.attention", "qkv", "o"),
    *_in("layers.*.feed_forward", "w1", "w2", "w3"),
    *("layers.*.adaln_modulation", "final_layer.adaln_modulation"),
)
"""Of Ideogram 4, of whose queries, keys and values it has one layer."""

LUMINA2 = _flat(
    "lora_unet",
    *(
        name
        for blocks in ("layers.*", "context_refiner.*", "noise_refiner.*")
        for name in (
            *_in(f"{blocks}.attention", "qkv", "out"),
            *_in(f"{blocks}.feed_forward", "w1", "w2", "w3"),
        )
    ),
    *("layers.*.adaLN_modulation.1", "noise_refiner.*.adaLN_modulation.1"),
    *("x_embedder", "cap_embedder.1", "t_embedder.mlp.0", "t_embedder.mlp.2"),
    *("final_layer.linear", "final_layer.adaLN_modulation.1"),
)
"""Of Lumina 2, too. Those that ComfyUI takes of diffusers' names for its class are Z-Image's."""

MINIMAX_H3 = _flat(
    "lora_unet",
    *(
        name
        for blocks in ("blocks.*", "token_refiner.blocks.*")
        for name in (*_in(f"{blocks}.attn", "qkv_proj", "out_proj"), *_in(f"{blocks}.mlp", "fc1", "fc2"))
    ),
)
"""Layers of the blocks of MiniMax-H3, of whose queries, keys and values it has one layer."""

TAKEN: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("flux", "flux_fill", "flux_kontext", "flux2", "chroma"), _in("transformer", *_FLUX)),
    **dict.fromkeys(
        ("qwen_image", "qwen_image_edit", "qwen_image_layered"), _in("transformer", *_QWEN_IMAGE)
    ),
    "aura_flow": _in("transformer", *_AURA_FLOW),
    **dict.fromkeys(("longcat_image", "longcat_image_edit"), _LONGCAT_IMAGE),
    "anima": _in("diffusion_model", *_ANIMA),
    "ernie_image": _in("diffusion_model", *_ERNIE_IMAGE),
    "hidream": _in("transformer", *_HIDREAM),
    "qwen_image_21": _in("transformer", *_QWEN_IMAGE_21),
    **dict.fromkeys(("krea2", "krea2_edit"), _in("transformer", *_KREA2)),
    **dict.fromkeys(("kandinsky5", "kandinsky5_video"), _in("transformer", *_KANDINSKY5)),
    "z_image": _in("transformer", *_Z_IMAGE),
    **dict.fromkeys(("wan", "wan_i2v", "wan_animate"), _in("diffusion_model", *_WAN)),
    "ltx2": _in("diffusion_model", *_LTX2),
    "ltx_video": _in("diffusion_model", *_LTX_VIDEO),
    "sd3": _in("transformer", *_SD3),
    "sdxl": (*_flat("lora_unet", *_UNET), *_flat("lora_te1", *_CLIP), *_flat("lora_te2", *_CLIP)),
    **dict.fromkeys(
        (
            *("cogvideox", "ideogram4", "lumina2", "minimax_h3"),
            *("wan_vace", "hunyuan_video", "hunyuan_video_15", "hunyuan_video_i2v"),
        ),
        (),
    ),
    "sana": (),  # not in ComfyUI
}
"""Names of layers in files for the model of each family, of the spelling that diffusers takes as well."""
CONVERTED: Mapping[str, tuple[str, ...]] = {
    "cogvideox": COGVIDEOX,
    **dict.fromkeys(("hunyuan_video", "hunyuan_video_i2v"), HUNYUAN_VIDEO),
    "hunyuan_video_15": HUNYUAN_VIDEO_15,
    "ideogram4": IDEOGRAM4,
    "lumina2": LUMINA2,
    "minimax_h3": MINIMAX_H3,
    "wan_vace": WAN_VACE,
}
"""Names of layers in files for ComfyUI, of families whose files are converted for it."""


def updates_in_comfyui(family: str, file: Path) -> Iterator[tuple[str, LoraPair]]:
    """What ComfyUI does with a file, by the layers' names in it: it reads no metadata."""
    tensors = load_file(file)
    pattern = re.compile("|".join(re.escape(name).replace(r"\*", r"\d+") for name in TAKEN[family]) or "(?!)")
    for down_ending, up_ending in _ENDINGS:
        for name, down in tensors.items():
            layer = name.removesuffix(down_ending)
            if layer != name and pattern.fullmatch(layer):
                strength = tensors.get(f"{layer}.alpha")
                alpha = float(len(down) if strength is None else strength)
                yield layer, LoraPair(down=down, up=tensors[f"{layer}{up_ending}"], alpha=alpha)
