"""Models' tensors as their own repositories store them: the opposite of what diffusers' converters do.

The converters prove that: a wrong name here is a tensor that they miss. They have none for CogVideoX,
whose names here are those of ComfyUI's model (``comfy/ldm/cogvideo/model.py``).
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from sdxl_checkpoint import unet_layout
from torch import Tensor, nn

_BLOCKS_OF_FLUX = r"""
^single_transformer_blocks                    single_blocks
^transformer_blocks                           double_blocks
^(double_blocks.*)ff\.                        \1img_mlp.
^(double_blocks.*)ff_context\.                \1txt_mlp.
_mlp\.(net\.0\.proj|linear_in)                _mlp.0
_mlp\.(net\.2|linear_out)                     _mlp.2
^(double_blocks.*)attn\.norm_([qk])\.weight   \1img_attn.norm.<\2>_norm.scale
^(double_blocks.*)attn\.norm_added_([qk])\.weight  \1txt_attn.norm.<\2>_norm.scale
^(single_blocks.*)attn\.norm_([qk])\.weight   \1norm.<\2>_norm.scale
<q>                                           query
<k>                                           key
attn\.to_add_out                              txt_attn.proj
attn\.to_out\.0                               img_attn.proj
attn\.to_qkv_mlp_proj                         linear1
attn\.to_out                                  linear2
^(single_blocks.*)proj_out                    \1linear2
^(single_blocks.*)attn\.to_q                  \1linear1
^(single_blocks.*)attn\.to_k                  \1linear1
^(single_blocks.*)attn\.to_v                  \1linear1
^(single_blocks.*)proj_mlp                    \1linear1
attn\.to_q\.                                  img_attn.qkv.
attn\.to_k\.                                  img_attn.qkv.
attn\.to_v\.                                  img_attn.qkv.
attn\.add_q_proj                              txt_attn.qkv
attn\.add_k_proj                              txt_attn.qkv
attn\.add_v_proj                              txt_attn.qkv
^proj_out                                     final_layer.linear
^norm_out\.linear                             final_layer.adaLN_modulation.1
^context_embedder                             txt_in
^x_embedder                                   img_in
"""
_TEXT_OF_HUNYUAN = r"""
^context_embedder\.time_text_embed\.timestep_embedder\.linear_1  txt_in.t_embedder.mlp.0
^context_embedder\.time_text_embed\.timestep_embedder\.linear_2  txt_in.t_embedder.mlp.2
^context_embedder\.time_text_embed\.text_embedder  txt_in.c_embedder
^context_embedder\.proj_in                     txt_in.input_embedder
^context_embedder\.token_refiner\.refiner_blocks  txt_in.individual_token_refiner.blocks
^(txt_in.*)norm_out\.linear                    \1adaLN_modulation.1
^(txt_in.*)attn\.to_q                          \1self_attn_qkv
^(txt_in.*)attn\.to_k                          \1self_attn_qkv
^(txt_in.*)attn\.to_v                          \1self_attn_qkv
^(txt_in.*)attn\.to_out\.0                     \1self_attn_proj
^(txt_in.*)ff\.net\.0\.proj                    \1mlp.fc1
^(txt_in.*)ff\.net\.2                          \1mlp.fc2
"""
_BLOCKS_OF_HUNYUAN = r"""
^transformer_blocks                           double_blocks
^(double_blocks.*)norm1\.                      \1img_mod.
^(double_blocks.*)norm1_context\.              \1txt_mod.
^(double_blocks.*)attn\.norm_([qk])            \1img_attn_\2_norm
^(double_blocks.*)attn\.norm_added_([qk])      \1txt_attn_\2_norm
^(double_blocks.*)attn\.to_out\.0              \1img_attn_proj
^(double_blocks.*)attn\.to_add_out             \1txt_attn_proj
^(double_blocks.*)ff\.                         \1img_mlp.
^(double_blocks.*)ff_context\.                 \1txt_mlp.
_mlp\.net\.0\.proj                             _mlp.fc1
_mlp\.net\.2                                   _mlp.fc2
^norm_out\.linear                              final_layer.adaLN_modulation.1
^proj_out                                     final_layer.linear
^x_embedder                                   img_in
"""
_OF_WAN = r"""
^condition_embedder\.time_embedder\.linear_1  time_embedding.0
^condition_embedder\.time_embedder\.linear_2  time_embedding.2
^condition_embedder\.text_embedder\.linear_1  text_embedding.0
^condition_embedder\.text_embedder\.linear_2  text_embedding.2
^condition_embedder\.time_proj                time_projection.1
^condition_embedder\.image_embedder\.norm1    img_emb.proj.0
^condition_embedder\.image_embedder\.ff\.net\.0\.proj  img_emb.proj.1
^condition_embedder\.image_embedder\.ff\.net\.2  img_emb.proj.3
^condition_embedder\.image_embedder\.norm2    img_emb.proj.4
^scale_shift_table                            head.modulation
^proj_out                                     head.head
scale_shift_table                             modulation
norm2                                         norm3
attn1\.                                       self_attn.
attn2\.                                       cross_attn.
to_out\.0                                     o
to_([qkv])                                    \1
add_([kv])_proj                               \1_img
norm_added_k                                  norm_k_img
ffn\.net\.0\.proj                             ffn.0
ffn\.net\.2                                   ffn.2
"""
_RULES = {
    "HunyuanVideo15Transformer3DModel": rf"""
{_TEXT_OF_HUNYUAN}
{_BLOCKS_OF_HUNYUAN}
^time_embed\.timestep_embedder\.linear_1       time_in.mlp.0
^time_embed\.timestep_embedder\.linear_2       time_in.mlp.2
^cond_type_embed                              cond_type_embedding
^context_embedder_2\.norm                      byt5_in.layernorm
^context_embedder_2\.linear_                   byt5_in.fc
^image_embedder\.norm_in                       vision_in.proj.0
^image_embedder\.linear_1                      vision_in.proj.1
^image_embedder\.linear_2                      vision_in.proj.3
^image_embedder\.norm_out                      vision_in.proj.4
^(double_blocks.*)attn\.to_([qkv])             \1img_attn_\2
^(double_blocks.*)attn\.add_([qkv])_proj       \1txt_attn_\2
""",
    "HunyuanVideoTransformer3DModel": rf"""
{_TEXT_OF_HUNYUAN}
^single_transformer_blocks                    single_blocks
^(single.*)proj_out                           \1linear2
^(single.*)norm\.                             \1modulation.
^(single.*)attn\.norm_([qk])                  \1\2_norm
^(single.*)attn\.to_q                         \1linear1
^(single.*)attn\.to_k                         \1linear1
^(single.*)attn\.to_v                         \1linear1
^(single.*)proj_mlp                           \1linear1
{_BLOCKS_OF_HUNYUAN}
^time_text_embed\.timestep_embedder\.linear_1  time_in.mlp.0
^time_text_embed\.timestep_embedder\.linear_2  time_in.mlp.2
^time_text_embed\.guidance_embedder\.linear_1  guidance_in.mlp.0
^time_text_embed\.guidance_embedder\.linear_2  guidance_in.mlp.2
^time_text_embed\.text_embedder\.linear_1     vector_in.in_layer
^time_text_embed\.text_embedder\.linear_2     vector_in.out_layer
^(double_blocks.*)attn\.to_q                  \1img_attn_qkv
^(double_blocks.*)attn\.to_k                  \1img_attn_qkv
^(double_blocks.*)attn\.to_v                  \1img_attn_qkv
^(double_blocks.*)attn\.add_q_proj            \1txt_attn_qkv
^(double_blocks.*)attn\.add_k_proj            \1txt_attn_qkv
^(double_blocks.*)attn\.add_v_proj            \1txt_attn_qkv
""",
    **dict.fromkeys(
        ("FluxTransformer2DModel", "LongCatImageTransformer2DModel"),
        rf"""
^time_(text_)?embed\.timestep_embedder           time_in
^time_text_embed\.text_embedder               vector_in
^time_text_embed\.guidance_embedder           guidance_in
_in\.linear_1                                 _in.in_layer
_in\.linear_2                                 _in.out_layer
norm1\.linear                                 img_mod.lin
norm1_context\.linear                         txt_mod.lin
^(single.*)norm\.linear                       \1modulation.lin
{_BLOCKS_OF_FLUX}""",
    ),
    "ChromaTransformer2DModel": rf"""
^(distilled_guidance_layer.*)linear_1         \1in_layer
^(distilled_guidance_layer.*)linear_2         \1out_layer
^(distilled_guidance_layer\.norms.*)weight    \1scale
{_BLOCKS_OF_FLUX}""",
    "Flux2Transformer2DModel": rf"""
^time_guidance_embed\.timestep_embedder       time_in
^time_guidance_embed\.guidance_embedder       guidance_in
_in\.linear_1                                 _in.in_layer
_in\.linear_2                                 _in.out_layer
(modulation.*)\.linear                        \1.lin
{_BLOCKS_OF_FLUX}""",
    "CogVideoXTransformer3DModel": r"""
^transformer_blocks                           blocks
attn1\.norm_([qk])                            norm_\1
attn1\.to_([qkv])                             \1
attn1\.to_out\.0                              attn_out
ff\.net\.0\.proj                              ff_proj
ff\.net\.2                                    ff_out
^time_embedding\.                             time_embedding_
""",
    "ErnieImageTransformer2DModel": "",
    "Kandinsky5Transformer3DModel": "",
    "Ideogram4Transformer2DModel": r"""
attention\.norm_([qk])                        attention.norm_\1
attention\.to_out\.0                          attention.o
attention\.to_q                               attention.qkv
attention\.to_k                               attention.qkv
attention\.to_v                               attention.qkv
""",
    "Krea2Transformer2DModel": r"""
^img_in                                       first
^time_embed\.linear_1                         tmlp.0
^time_embed\.linear_2                         tmlp.2
^time_mod_proj                                tproj.1
^txt_in\.norm\.weight                         txtmlp.0.scale
^txt_in\.linear_1                             txtmlp.1
^txt_in\.linear_2                             txtmlp.3
^text_fusion                                  txtfusion
^final_layer\.scale_shift_table               last.modulation.lin
^final_layer\.norm\.weight                    last.norm.scale
^final_layer                                  last
^transformer_blocks                           blocks
scale_shift_table                             mod.lin
norm1\.weight                                 prenorm.scale
norm2\.weight                                 postnorm.scale
attn\.norm_([qk])\.weight                     attn.qknorm.\1norm.scale
attn\.to_([qkv])                              attn.w\1
attn\.to_out\.0                               attn.wo
attn\.to_gate                                 attn.gate
ff\.                                          mlp.
""",
    "LTXVideoTransformer3DModel": r"""
^proj_in                                      patchify_proj
^time_embed                                   adaln_single
norm_q                                        q_norm
norm_k                                        k_norm
""",
    "LTX2VideoTransformer3DModel": r"""
^(audio_)?proj_in                             \1patchify_proj
^(audio_)?time_embed                          \1adaln_single
^(audio_)?prompt_adaln                        \1prompt_adaln_single
^av_cross_attn_(\w+)_scale_shift              av_ca_\1_scale_shift_adaln_single
^av_cross_attn_(video|audio)_(a2v|v2a)_gate   av_ca_\2_gate_adaln_single
(video|audio)_a2v_cross_attn_scale_shift_table scale_shift_table_a2v_ca_\1
norm_q                                        q_norm
norm_k                                        k_norm
""",
    "HiDreamImageTransformer2DModel": "",
    "Lumina2Transformer2DModel": r"""
^time_caption_embed\.caption_embedder         cap_embedder
^time_caption_embed\.timestep_embedder\.linear_1  t_embedder.mlp.0
^time_caption_embed\.timestep_embedder\.linear_2  t_embedder.mlp.2
^norm_out\.linear_1                           final_layer.adaLN_modulation.1
^norm_out\.linear_2                           final_layer.linear
attn\.norm_([qk])                             attention.\1_norm
attn\.to_out\.0                               attention.out
attn\.to_q                                    attention.qkv
attn\.to_k                                    attention.qkv
attn\.to_v                                    attention.qkv
feed_forward\.linear_                         feed_forward.w
norm1\.linear                                 adaLN_modulation.1
(\d\.)norm1(\.norm)?\.weight                  \1attention_norm1.weight
(\d\.)norm2                                   \1attention_norm2
""",
    "QwenImageTransformer2DModel": "",
    "QwenImage21Transformer2DModel": r"""
img_mlp\.gate_layer                           img_mlp.gate_up
img_mlp\.proj                                 img_mlp.gate_up
""",
    "SanaTransformer2DModel": r"""
^patch_embed                                  x_embedder
^time_embed\.emb\.timestep_embedder\.linear_1 t_embedder.mlp.0
^time_embed\.emb\.timestep_embedder\.linear_2 t_embedder.mlp.2
^time_embed\.linear                           t_block.1
^caption_projection\.linear_                  y_embedder.y_proj.fc
^caption_norm                                 attention_y_norm
^(proj_out|scale_shift_table)                 final_layer.\1
final_layer\.proj_out                         final_layer.linear
^transformer_blocks                           blocks
attn1\.to_out\.0                              attn.proj
attn1\.to_q                                   attn.qkv
attn1\.to_k                                   attn.qkv
attn1\.to_v                                   attn.qkv
attn2\.to_out\.0                              cross_attn.proj
attn2\.to_q                                   cross_attn.q_linear
attn2\.to_k                                   cross_attn.kv_linear
attn2\.to_v                                   cross_attn.kv_linear
ff\.conv_inverted                             mlp.inverted_conv.conv
ff\.conv_(depth|point)                        mlp.\1_conv.conv
""",
    "SD3Transformer2DModel": r"""
^pos_embed\.pos_embed                         pos_embed
^pos_embed\.proj                              x_embedder.proj
^time_text_embed\.timestep_embedder           t_embedder
^time_text_embed\.text_embedder               y_embedder
_embedder\.linear_1                           _embedder.mlp.0
_embedder\.linear_2                           _embedder.mlp.2
^proj_out                                     final_layer.linear
^norm_out\.linear                             final_layer.adaLN_modulation.1
^transformer_blocks                           joint_blocks
norm1\.linear                                 x_block.adaLN_modulation.1
norm1_context\.linear                         context_block.adaLN_modulation.1
attn(2?)\.norm_([qk])                         x_block.attn\1.ln_\2
attn\.norm_added_([qk])                       context_block.attn.ln_\1
attn(2?)\.to_out\.0                           x_block.attn\1.proj
attn\.to_add_out                              context_block.attn.proj
attn(2?)\.to_q                                x_block.attn\1.qkv
attn(2?)\.to_k                                x_block.attn\1.qkv
attn(2?)\.to_v                                x_block.attn\1.qkv
attn\.add_q_proj                              context_block.attn.qkv
attn\.add_k_proj                              context_block.attn.qkv
attn\.add_v_proj                              context_block.attn.qkv
ff\.net\.0\.proj                              x_block.mlp.fc1
ff\.net\.2                                    x_block.mlp.fc2
ff_context\.net\.0\.proj                      context_block.mlp.fc1
ff_context\.net\.2                            context_block.mlp.fc2
""",
    "WanAnimateTransformer3DModel": rf"""
^motion_encoder\.motion_synthesis_weight      motion_encoder.dec.direction.weight
^motion_encoder\.conv_in\.act_fn\.bias        motion_encoder.enc.net_app.convs.0.1.bias
^motion_encoder\.conv_in                      motion_encoder.enc.net_app.convs.0.0
^motion_encoder\.conv_out                     motion_encoder.enc.net_app.convs.8
^motion_encoder\.motion_network               motion_encoder.enc.fc
^motion_encoder\.res_blocks\.0                motion_encoder.enc.net_app.convs.1
^motion_encoder\.res_blocks\.1                motion_encoder.enc.net_app.convs.2
(convs\.\d\.conv1)\.act_fn                    \1.1
(convs\.\d\.conv2)\.act_fn                    \1.2
(convs\.\d\.conv1)\.weight                    \1.0.weight
(convs\.\d)\.conv_skip                        \1.skip.1
(convs\.\d\.conv2)\.weight                    \1.1.weight
^(face_encoder\.conv.*)\.(weight|bias)        \1.conv.\2
^face_adapter                                 face_adapter.fuser_blocks
fuser_blocks\.(\d+)\.norm_([qk])              fuser_blocks.\1.\2_norm
fuser_blocks\.(\d+)\.to_q                     fuser_blocks.\1.linear1_q
fuser_blocks\.(\d+)\.to_[kv]                  fuser_blocks.\1.linear1_kv
fuser_blocks\.(\d+)\.to_out                   fuser_blocks.\1.linear2
{_OF_WAN}""",
    "WanTransformer3DModel": _OF_WAN,
    "WanVACETransformer3DModel": rf"""
^(vace_blocks.*)proj_in                       \1before_proj
^(vace_blocks.*)proj_out                      \1after_proj
{_OF_WAN}""",
    "ZImageTransformer2DModel": r"""
^all_x_embedder\.2-1                          x_embedder
^all_final_layer\.2-1                         final_layer
attention\.norm_([qk])                        attention.\1_norm
attention\.to_out\.0                          attention.out
attention\.to_q                               attention.qkv
attention\.to_k                               attention.qkv
attention\.to_v                               attention.qkv
""",
    "CosmosTransformer3DModel": r"""
^transformer_blocks                           blocks
norm1\.linear_([12])                          adaln_modulation_self_attn.\1
norm2\.linear_([12])                          adaln_modulation_cross_attn.\1
norm3\.linear_([12])                          adaln_modulation_mlp.\1
attn1                                         self_attn
attn2                                         cross_attn
to_([qkv])                                    \1_proj
to_out\.0                                     output_proj
norm_([qk])                                   \1_norm
ff\.net\.0\.proj                              mlp.layer1
ff\.net\.2                                    mlp.layer2
^norm_out\.linear_([12])                      final_layer.adaln_modulation.\1
^proj_out                                     final_layer.linear
^time_embed\.t_embedder                       t_embedder.1
^time_embed\.norm                             t_embedding_norm
^patch_embed\.proj                            x_embedder.proj.1
""",
    "Flux3Transformer2DModel": r"""
^timestep_embedder\.linear_1                  time_in.in_layer
^timestep_embedder\.linear_2                  time_in.out_layer
^target_timestep_embedder\.linear_1           ref_time_in.in_layer
^target_timestep_embedder\.linear_2           ref_time_in.out_layer
^proj_out                                     final_layer.image.linear
^norm_out\.linear                             final_layer.image.adaLN_modulation.1
^x_embedders                                  emb_in
^context_embedder                             txt_in
^mode_blocks                                  content_mode_blocks
^single_transformer_blocks                    single_blocks
^(.*_stream_modulations\.\w+)\.linear         \1.lin
attn\.to_([qkv])                              \1_proj
attn\.to_out\.0                               attn_out
attn\.norm_q\.weight                          norm.query_norm.scale
attn\.norm_k\.weight                          norm.key_norm.scale
ff\.linear_in                                 mlp_in
ff\.linear_out                                mlp_out
""",
    "MiniMaxH3Transformer3DModel": r"""
^transformer_blocks                           blocks
^token_refiner\.refiner_blocks                token_refiner.blocks
^time_embedder\.linear_1                      time_embedder.proj_in
^time_embedder\.linear_2                      time_embedder.proj_out
^proj_in                                      video_patch_proj
^audio_proj_in                                audio_patch_proj
^context_embedder                             condition_proj
^norm_out\.linear                             final_layer.adaln_proj.linear
^norm_out                                     final_layer
^proj_out                                     final_layer.video_out
^audio_proj_out                               final_layer.audio_out
attn\.norm_([qk])                             attn.\1_norm
attn\.to_out\.0                               attn.out_proj
attn\.to_q                                    attn.qkv_proj
attn\.to_k                                    attn.qkv_proj
attn\.to_v                                    attn.qkv_proj
ff\.net\.0\.proj                              mlp.fc1
ff\.net\.2                                    mlp.fc2
""",
    "AuraFlowTransformer2DModel": r"""
^pos_embed\.pos_embed                         positional_encoding
^pos_embed\.proj                              init_x_linear
^context_embedder                             cond_seq_linear
^time_step_proj\.linear_1                     t_embedder.mlp.0
^time_step_proj\.linear_2                     t_embedder.mlp.2
^proj_out                                     final_linear
^norm_out\.linear                             modF.1
^joint_transformer_blocks                     double_layers
^single_transformer_blocks                    single_layers
^(double.*)norm1\.linear                      \1modX.1
^(double.*)norm1_context\.linear              \1modC.1
^(single.*)norm1\.linear                      \1modCX.1
^(single.*)ff\.                               \1mlp.
ff\.                                          mlpX.
ff_context\.                                  mlpC.
out_projection                                c_proj
linear_([12])                                 c_fc\1
add_([qkv])_proj                              w1\1
to_add_out                                    w1o
^(double.*)to_out\.0                          \1w2o
^(double.*)to_([qkv])                         \1w2\2
to_out\.0                                     w1o
to_([qkv])                                    w1\1
""",
}
"""What each model's tensors are called, by rules that follow each other. Those that come to have one name
are one tensor there, its parts in the order of the rules."""
_SWAPPED = {
    "HunyuanVideoTransformer3DModel": r"final_layer\.adaLN_modulation\.1",
    "HunyuanVideo15Transformer3DModel": r"final_layer\.adaLN_modulation\.1",
    "FluxTransformer2DModel": r"final_layer\.adaLN_modulation\.1",
    "LongCatImageTransformer2DModel": r"final_layer\.adaLN_modulation\.1",
    "Flux2Transformer2DModel": r"final_layer\.adaLN_modulation\.1",
    "Flux3Transformer2DModel": r"final_layer\.image\.adaLN_modulation\.1",
    "AuraFlowTransformer2DModel": r"modF\.1",
    "MiniMaxH3Transformer3DModel": r".*\.mlp\.fc1",
    # The last block of a small one is the second.
    "SD3Transformer2DModel": r"(final_layer|joint_blocks\.1\.context_block)\.adaLN_modulation\.1",
}
"""Layers with shift and scale, or with a gate and a value, which diffusers has the other way round."""
_FLAT = {"Krea2Transformer2DModel": r"^blocks\.\d+\.mod\.lin$"}
"""Tensors that have one axis."""
_MORE = {"SanaTransformer2DModel": ("pos_embed", "y_embedder.y_embedding")}
"""What the models do not have in diffusers."""
_WIDTH_OF_FLUX = 3072


def original_layout(model: nn.Module) -> dict[str, Tensor] | None:
    """The tensors of a model of diffusers in its original layout; None where diffusers knows none of it."""
    class_name = type(model).__name__
    if class_name == "UNet2DConditionModel":
        return unet_layout(model)
    if class_name not in _RULES:
        assert class_name not in SINGLE_FILE_LOADABLE_CLASSES
        return None
    rules = [rule.split() for rule in _RULES[class_name].splitlines() if rule]
    parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
    for name, tensor in model.state_dict().items():
        place = 0
        for index, (pattern, replacement) in enumerate(rules):
            name, count = re.subn(pattern, replacement, name)
            place = index if count else place
        parts[name].append((place, tensor))
    in_order = {name: sorted(those, key=lambda part: part[0]) for name, those in parts.items()}
    tensors = {name: torch.cat([part for _, part in those]) for name, those in in_order.items()}
    for name in tensors:
        if re.fullmatch(_SWAPPED.get(class_name, "(?!)"), name.rpartition(".")[0]):
            tensors[name] = torch.cat(tensors[name].chunk(2)[::-1])
        if re.search(_FLAT.get(class_name, "(?!)"), name):
            tensors[name] = tensors[name].flatten()
        if re.search(r"\.net_app\.convs\..*\.bias$", name):
            tensors[name] = tensors[name][None, :, None, None]
    return tensors | {name: torch.ones(1, 2) for name in _MORE.get(class_name, ())}


def functions_for(model: nn.Module) -> dict[str, Any]:
    """What diffusers has for single files of a model; LongCat-Image's are read by what it has for FLUX.1."""
    name = "FluxTransformer2DModel" if "LongCat" in type(model).__name__ else type(model).__name__
    functions: dict[str, Any] = SINGLE_FILE_LOADABLE_CLASSES.get(name, {})
    return functions


def convert_width_of(model: nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Have diffusers' converter cut a tiny model's tensors: those of some models have the released widths."""
    functions = functions_for(model)
    converter = functions.get("checkpoint_mapping_fn")
    if converter is None:
        return
    config, widths = model.config, {}
    if "num_kv_heads" in config:  # queries, and keys and values, of Lumina 2
        width_of_head = config.hidden_size // config.num_attention_heads
        widths = {2304: config.hidden_size, 768: width_of_head * config.num_kv_heads}
    elif _has_width(converter.__code__):
        widths = {_WIDTH_OF_FLUX: config.num_attention_heads * config.attention_head_dim}
    code = _of_widths(converter.__code__, widths)
    changed = FunctionType(code, converter.__globals__, argdefs=converter.__defaults__)
    patch.setitem(functions, "checkpoint_mapping_fn", changed)


def _has_width(code: CodeType) -> bool:
    """Whether the code of a function, or of one in it, has the released width of these models."""
    return any(
        _has_width(value) if isinstance(value, CodeType) else value == _WIDTH_OF_FLUX
        for value in code.co_consts
    )


def _of_widths(code: CodeType, widths: Mapping[int, int]) -> CodeType:
    constants = (
        _of_widths(value, widths) if isinstance(value, CodeType) else widths.get(value, value)
        for value in code.co_consts
    )
    return code.replace(co_consts=tuple(constants))
