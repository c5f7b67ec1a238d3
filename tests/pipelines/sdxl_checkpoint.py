"""SDXL's tensors as in checkpoints of one file: the opposite of what diffusers' converters do.

The converters prove that: a wrong name here is a tensor that they miss.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor

UNET, VAE = "model.diffusion_model.", "first_stage_model."
TEXT_ENCODER, TEXT_ENCODER_2 = "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
_OF_UNET = r"""
^conv_in                            input_blocks.0.0
^conv_norm_out                      out.0
^conv_out                           out.2
^time_embedding\.linear_1           time_embed.0
^time_embedding\.linear_2           time_embed.2
^add_embedding\.linear_1            label_emb.0.0
^add_embedding\.linear_2            label_emb.0.2
^mid_block\.resnets\.0              middle_block.0
^mid_block\.attentions\.0           middle_block.1
^mid_block\.resnets\.1              middle_block.2
^((?:in|out)put_blocks\.\d+\.0|middle_block\.[02])\.norm1           \1.in_layers.0
conv1                               in_layers.2
time_emb_proj                       emb_layers.1
^((?:in|out)put_blocks\.\d+\.0|middle_block\.[02])\.norm2           \1.out_layers.0
conv2                               out_layers.3
conv_shortcut                       skip_connection
"""
_OF_VAE = r"""
conv_norm_out                       norm_out
conv_shortcut                       nin_shortcut
mid_block\.resnets\.0               mid.block_1
mid_block\.resnets\.1               mid.block_2
mid_block\.attentions\.0            mid.attn_1
attn_1\.group_norm                  attn_1.norm
attn_1\.to_out\.0                   attn_1.proj_out
attn_1\.to_                         attn_1.
down_blocks\.(\d)\.resnets          down.\1.block
down_blocks\.(\d)\.downsamplers\.0  down.\1.downsample
"""
_OF_OPEN_CLIP = r"""
^text_model\.                       ""
^embeddings\.position_embedding\.weight  positional_embedding
^embeddings\.                       ""
^final_layer_norm                   ln_final
^text_projection\.weight            text_projection
^encoder\.layers                    transformer.resblocks
layer_norm                          ln_
fc1                                 c_fc
fc2                                 c_proj
self_attn\.[qkv]_proj\.             attn.in_proj_
self_attn                           attn
"""


def sdxl_checkpoint(pipeline: StableDiffusionXLPipeline) -> dict[str, Tensor]:
    """All tensors of a whole checkpoint, and some that are of no use, as they all have them."""
    return {
        **{f"{UNET}{name}": tensor for name, tensor in unet_layout(pipeline.unet).items()},
        **_vae_layout(pipeline.vae.state_dict()),
        **{f"{TEXT_ENCODER}text_model.{name}": it for name, it in pipeline.text_encoder.state_dict().items()},
        **_open_clip_layout(pipeline.text_encoder_2.state_dict()),
        f"{TEXT_ENCODER}text_model.embeddings.position_ids": torch.arange(77)[None],
        f"{TEXT_ENCODER_2}logit_scale": torch.tensor(4.6),
    }


def unet_layout(unet: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a UNet by their original names, without a prefix."""
    per_level = unet.config.layers_per_block + 1
    attended = [block.startswith("CrossAttn") for block in unet.config.up_block_types]

    def in_sequence(name: str) -> str:
        """Blocks by one number, and resnet 0 and attention 1 within each."""
        if found := re.match(r"(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.", name):
            side, level, kind, place = found[1], int(found[2]), found[3], int(found[4])
            rest = name[found.end() :]
            number = level * per_level + place + (side == "down")
            part = {"resnets": "0.", "attentions": "1."}.get(kind)
            if kind == "upsamplers":
                number, part = number + per_level - 1, f"{1 + attended[level]}."
            if kind == "downsamplers":
                number, part, rest = number + per_level - 1, "0.", rest.replace("conv", "op")
            name = f"{'input' if side == 'down' else 'output'}_blocks.{number}.{part}{rest}"
        return name

    return {_renamed(in_sequence(name), _OF_UNET): tensor for name, tensor in unet.state_dict().items()}


def _vae_layout(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    levels = 1 + max(int(found[1]) for name in tensors if (found := re.search(r"up_blocks\.(\d)", name)))
    named = {}
    for name, tensor in tensors.items():
        new = _renamed(name, _OF_VAE)
        if found := re.search(r"up_blocks\.(\d)\.", new):
            new = new.replace(found[0], f"up.{levels - 1 - int(found[1])}.")
            new = new.replace("resnets", "block").replace("upsamplers.0", "upsample")
        is_conv = "attn_1" in new and tensor.ndim == 2
        named[f"{VAE}{new}"] = tensor[:, :, None, None] if is_conv else tensor
    return named


def _open_clip_layout(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in sorted(tensors.items(), key=lambda item: _in_qkv(item[0])):
        parts[_renamed(name, _OF_OPEN_CLIP)].append(tensor)
    named = {f"{TEXT_ENCODER_2}{name}": torch.cat(those) for name, those in parts.items()}
    return named | {f"{TEXT_ENCODER_2}text_projection": tensors["text_projection.weight"].T}


def _in_qkv(name: str) -> int:
    found = re.search(r"\.([qkv])_proj", name)
    return "qkv".index(found[1]) if found else 0


def _renamed(name: str, rules: str) -> str:
    for rule in filter(None, rules.splitlines()):
        pattern, replacement = rule.split()
        name = re.sub(pattern, replacement.replace('""', ""), name)
    return name
