"""This file lists the layers of SDXL that a LoRA may be on, and what else files call them."""

from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed, renamed_in, under
from diffsynth_lite.lora.shared_names import ATTENTIONS, CLIP, EMBEDDER, QKV
from diffsynth_lite.lora.spelling import Spelling

SDXL_NAMES = Spelling(
    prefixes={"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"},
    renames=(("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2")),
    is_flat=True,
    unknown_to_comfyui=(),
)
"""kohya's: diffusers' names of the UNet, except two that its pipeline would not recognize, and those of CLIP
as transformers had them before version 5."""

_RESNET = {
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_TRANSFORMER = (
    *("proj_in", "proj_out"),
    *under("transformer_blocks.*", (*ATTENTIONS, "ff.net.0.proj", "ff.net.2")),
)
_RESNETS = {
    **{f"input_blocks.{3 * i + j + 1}.0": f"down_blocks.{i}.resnets.{j}" for i in range(3) for j in range(2)},
    **{f"output_blocks.{3 * i + j}.0": f"up_blocks.{i}.resnets.{j}" for i in range(3) for j in range(3)},
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.2": "mid_block.resnets.1",
}
_TRANSFORMERS = {
    **{
        f"input_blocks.{3 * i + j + 1}.1": f"down_blocks.{i}.attentions.{j}" for i in (1, 2) for j in range(2)
    },
    **{f"output_blocks.{3 * i + j}.1": f"up_blocks.{i}.attentions.{j}" for i in (0, 1) for j in range(3)},
    "middle_block.1": "mid_block.attentions.0",
}
_IN_UNET = ("down_blocks.*.attentions.*", "up_blocks.*.attentions.*", "mid_block.attentions.*")
_UNET = LayerNames(
    layers=(
        *(f"{block}.{layer}" for block in _IN_UNET for layer in _TRANSFORMER),
        *(
            f"{block}.resnets.*.{layer}"
            for block in ("down_blocks.*", "up_blocks.*", "mid_block")
            for layer in _RESNET.values()
        ),
        *("down_blocks.*.downsamplers.*.conv", "up_blocks.*.upsamplers.*.conv", "conv_in", "conv_out"),
        *under("time_embedding", EMBEDDER),
        *under("add_embedding", EMBEDDER),
    ),
    kohya={
        **renamed_in(_RESNETS, _RESNET),
        **renamed_in(_TRANSFORMERS, {layer: layer for layer in _TRANSFORMER}),
        **{f"input_blocks.{3 * i + 3}.0.op": renamed(f"down_blocks.{i}.downsamplers.0.conv") for i in (0, 1)},
        **{f"output_blocks.{3 * i + 2}.2.conv": renamed(f"up_blocks.{i}.upsamplers.0.conv") for i in (0, 1)},
        **renamed_in({"time_embed": "time_embedding"}, {"0": "linear_1", "2": "linear_2"}),
        **renamed_in({"label_emb.0": "add_embedding"}, {"0": "linear_1", "2": "linear_2"}),
        "input_blocks.0.0": renamed("conv_in"),
        "out.2": renamed("conv_out"),
    },
    others={  # diffusers' own before peft
        f"{block}.transformer_blocks.*.{part}.processor.{layer.removesuffix('.0')}_lora": renamed(
            f"{block}.transformer_blocks.*.{part}.{layer}"
        )
        for block in _IN_UNET
        for part in ("attn1", "attn2")
        for layer in (*QKV, "to_out.0")
    },
)

SDXL_LAYERS: LoraLayers = {"unet": _UNET, "text_encoder": CLIP, "text_encoder_2": CLIP}
