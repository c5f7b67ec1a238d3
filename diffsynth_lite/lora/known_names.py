"""This file lists the layers of released models that a LoRA may be on, and what else files call them.

Sources: the modules of diffusers' models, and its ``single_file_utils.py``, which turns original checkpoints
into these; of kohya's trainers the names that they write (sd-scripts ``networks/``, musubi-tuner
``networks/`` and ``convert_lora.py``); DiffSynth-Studio ``utils/lora/flux.py``; for XLabs
``lora_conversion_utils.py`` of diffusers.
"""

from collections.abc import Iterable, Mapping

from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, Original, fused, renamed
from diffsynth_lite.lora.spelt_names import ANIMA_LAYERS, COGVIDEOX_LAYERS, WAN_LAYERS

_QKV = ("to_q", "to_k", "to_v")
_ADDED_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")


def _under(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _renamed(prefixes: Mapping[str, str], names: Mapping[str, str]) -> dict[str, Original]:
    """Layers by their other names, from those within some blocks, and what the blocks are called."""
    return {
        f"{other}.{name}": renamed(f"{ours}.{layer}")
        for other, ours in prefixes.items()
        for name, layer in names.items()
    }


_EMBEDDER = ("linear_1", "linear_2")
_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_JOINT_ATTENTION = _under("attn", (*_QKV, "to_out.0", *_ADDED_QKV, "to_add_out"))
_FLUX_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
_FLUX_SINGLE = (*_under("attn", _QKV), "proj_mlp", "proj_out")
_TIME_AND_TEXT = tuple(
    f"time_text_embed.{part}.{layer}"
    for part in ("timestep_embedder", "guidance_embedder", "text_embedder")
    for layer in _EMBEDDER
)
_FLUX_BLOCKS = {
    "double_blocks.*.img_attn.qkv": fused(*_under(f"{_DOUBLE}.attn", _QKV)),
    "double_blocks.*.txt_attn.qkv": fused(*_under(f"{_DOUBLE}.attn", _ADDED_QKV)),
    "double_blocks.*.img_attn.proj": renamed(f"{_DOUBLE}.attn.to_out.0"),
    "double_blocks.*.txt_attn.proj": renamed(f"{_DOUBLE}.attn.to_add_out"),
    "double_blocks.*.img_mlp.0": renamed(f"{_DOUBLE}.ff.net.0.proj", 4),
    "double_blocks.*.img_mlp.2": renamed(f"{_DOUBLE}.ff.net.2"),
    "double_blocks.*.txt_mlp.0": renamed(f"{_DOUBLE}.ff_context.net.0.proj", 4),
    "double_blocks.*.txt_mlp.2": renamed(f"{_DOUBLE}.ff_context.net.2"),
    "single_blocks.*.linear1": fused(
        *_under(f"{_SINGLE}.attn", _QKV), f"{_SINGLE}.proj_mlp", rows=(1, 1, 1, 4)
    ),
    "single_blocks.*.linear2": renamed(f"{_SINGLE}.proj_out"),
    "img_in": renamed("x_embedder"),
    "txt_in": renamed("context_embedder"),
    "final_layer.linear": renamed("proj_out"),
}
_LAST_NORM = Original(("norm_out.linear",), halves_swapped=True)
_ORIGINAL_EMBEDDER = {"in_layer": "linear_1", "out_layer": "linear_2"}

_FLUX = LayerNames(
    layers=(
        *_under(_DOUBLE, (*_JOINT_ATTENTION, *_FLUX_FEED_FORWARD, "norm1.linear", "norm1_context.linear")),
        *_under(_SINGLE, (*_FLUX_SINGLE, "norm.linear")),
        *_TIME_AND_TEXT,
        *("x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
    ),
    kohya={
        **_FLUX_BLOCKS,
        "double_blocks.*.img_mod.lin": renamed(f"{_DOUBLE}.norm1.linear"),
        "double_blocks.*.txt_mod.lin": renamed(f"{_DOUBLE}.norm1_context.linear"),
        "single_blocks.*.modulation.lin": renamed(f"{_SINGLE}.norm.linear"),
        **_renamed(
            {
                "time_in": "time_text_embed.timestep_embedder",
                "guidance_in": "time_text_embed.guidance_embedder",
                "vector_in": "time_text_embed.text_embedder",
            },
            _ORIGINAL_EMBEDDER,
        ),
        "final_layer.adaLN_modulation.1": _LAST_NORM,
    },
    others={
        # DiffSynth-Studio's
        "blocks.*.attn.a_to_qkv": _FLUX_BLOCKS["double_blocks.*.img_attn.qkv"],
        "blocks.*.attn.b_to_qkv": _FLUX_BLOCKS["double_blocks.*.txt_attn.qkv"],
        "blocks.*.attn.a_to_out": renamed(f"{_DOUBLE}.attn.to_out.0"),
        "blocks.*.attn.b_to_out": renamed(f"{_DOUBLE}.attn.to_add_out"),
        "blocks.*.ff_a.0": renamed(f"{_DOUBLE}.ff.net.0.proj"),
        "blocks.*.ff_a.2": renamed(f"{_DOUBLE}.ff.net.2"),
        "blocks.*.ff_b.0": renamed(f"{_DOUBLE}.ff_context.net.0.proj"),
        "blocks.*.ff_b.2": renamed(f"{_DOUBLE}.ff_context.net.2"),
        "blocks.*.norm1_a.linear": renamed(f"{_DOUBLE}.norm1.linear"),
        "blocks.*.norm1_b.linear": renamed(f"{_DOUBLE}.norm1_context.linear"),
        "single_blocks.*.to_qkv_mlp": _FLUX_BLOCKS["single_blocks.*.linear1"],
        "single_blocks.*.proj_out": renamed(f"{_SINGLE}.proj_out"),
        "single_blocks.*.norm.linear": renamed(f"{_SINGLE}.norm.linear"),
        # XLabs'
        "double_blocks.*.processor.qkv_lora1": _FLUX_BLOCKS["double_blocks.*.img_attn.qkv"],
        "double_blocks.*.processor.qkv_lora2": _FLUX_BLOCKS["double_blocks.*.txt_attn.qkv"],
        "double_blocks.*.processor.proj_lora1": renamed(f"{_DOUBLE}.attn.to_out.0"),
        "double_blocks.*.processor.proj_lora2": renamed(f"{_DOUBLE}.attn.to_add_out"),
        "single_blocks.*.processor.qkv_lora": fused(*_under(f"{_SINGLE}.attn", _QKV)),
        "single_blocks.*.processor.proj_lora": renamed(f"{_SINGLE}.proj_out"),
    },
)

_CHROMA = LayerNames(
    layers=(
        *_under(_DOUBLE, (*_JOINT_ATTENTION, *_FLUX_FEED_FORWARD)),
        *_under(_SINGLE, _FLUX_SINGLE),
        *_under("distilled_guidance_layer", ("in_proj", "out_proj", *_under("layers.*", _EMBEDDER))),
        *("x_embedder", "context_embedder", "proj_out"),
    ),
    kohya={
        **_FLUX_BLOCKS,
        **_renamed(
            {"distilled_guidance_layer.layers.*": "distilled_guidance_layer.layers.*"}, _ORIGINAL_EMBEDDER
        ),
    },
)

_FLUX2 = LayerNames(
    layers=(
        *_under(_DOUBLE, _JOINT_ATTENTION),
        *_under(_DOUBLE, ("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out")),
        *_under(_SINGLE, ("attn.to_qkv_mlp_proj", "attn.to_out")),
        *_under("time_guidance_embed.timestep_embedder", _EMBEDDER),
        *_under("time_guidance_embed.guidance_embedder", _EMBEDDER),
        *("double_stream_modulation_img.linear", "double_stream_modulation_txt.linear"),
        *("single_stream_modulation.linear", "x_embedder", "context_embedder", "norm_out.linear", "proj_out"),
    ),
    kohya={
        **{
            name: place
            for name, place in _FLUX_BLOCKS.items()
            if "_mlp." not in name and "linear" not in name
        },
        "double_blocks.*.img_mlp.0": renamed(f"{_DOUBLE}.ff.linear_in", 6),
        "double_blocks.*.img_mlp.2": renamed(f"{_DOUBLE}.ff.linear_out"),
        "double_blocks.*.txt_mlp.0": renamed(f"{_DOUBLE}.ff_context.linear_in", 6),
        "double_blocks.*.txt_mlp.2": renamed(f"{_DOUBLE}.ff_context.linear_out"),
        "single_blocks.*.linear1": renamed(f"{_SINGLE}.attn.to_qkv_mlp_proj", 9),
        "single_blocks.*.linear2": renamed(f"{_SINGLE}.attn.to_out"),
        **_renamed(
            {
                "time_in": "time_guidance_embed.timestep_embedder",
                "guidance_in": "time_guidance_embed.guidance_embedder",
            },
            _ORIGINAL_EMBEDDER,
        ),
        "double_stream_modulation_img.lin": renamed("double_stream_modulation_img.linear"),
        "double_stream_modulation_txt.lin": renamed("double_stream_modulation_txt.linear"),
        "single_stream_modulation.lin": renamed("single_stream_modulation.linear"),
        "final_layer.linear": renamed("proj_out"),
        "final_layer.adaLN_modulation.1": _LAST_NORM,
    },
)

_QWEN_IMAGE = LayerNames(
    layers=(
        *_under(_DOUBLE, _JOINT_ATTENTION),
        *_under(_DOUBLE, ("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2")),
        *_under(_DOUBLE, ("img_mod.1", "txt_mod.1")),
        *_under("time_text_embed.timestep_embedder", _EMBEDDER),
        *("img_in", "txt_in", "norm_out.linear", "proj_out"),
    )
)

_QWEN_IMAGE_21 = LayerNames(
    layers=(
        *_under(f"{_DOUBLE}.attn", (*_QKV, "to_out.0")),
        *_under(f"{_DOUBLE}.img_mlp", ("gate_layer", "proj", "out")),
        *_under("time_text_embed.timestep_embedder", _EMBEDDER),
        *("img_in", "txt_in.in_layer", "txt_in.out_layer", "modulation.1", "norm_out.linear", "proj_out"),
    ),
    others={  # in ComfyUI's model
        f"{_DOUBLE}.img_mlp.gate_up": Original(
            _under(f"{_DOUBLE}.img_mlp", ("gate_layer", "proj")), rows=(1, 1), growth=6
        )
    },
)

_Z_IMAGE_BLOCKS = ("layers.*", "noise_refiner.*", "context_refiner.*")
_FEED_FORWARD_GATED = _under("feed_forward", ("w1", "w2", "w3"))
_Z_IMAGE = LayerNames(
    layers=(
        *(f"{block}.attention.{layer}" for block in _Z_IMAGE_BLOCKS for layer in (*_QKV, "to_out.0")),
        *(f"{block}.{layer}" for block in _Z_IMAGE_BLOCKS for layer in _FEED_FORWARD_GATED),
        *("layers.*.adaLN_modulation.0", "noise_refiner.*.adaLN_modulation.0"),
        *("all_x_embedder.2-1", "all_final_layer.2-1.linear", "all_final_layer.2-1.adaLN_modulation.1"),
        *("t_embedder.mlp.0", "t_embedder.mlp.2", "cap_embedder.1"),
    ),
    others={
        **{f"{block}.attention.qkv": fused(*_under(f"{block}.attention", _QKV)) for block in _Z_IMAGE_BLOCKS},
        **{f"{block}.attention.out": renamed(f"{block}.attention.to_out.0") for block in _Z_IMAGE_BLOCKS},
        "x_embedder": renamed("all_x_embedder.2-1"),
        "final_layer.linear": renamed("all_final_layer.2-1.linear"),
        "final_layer.adaLN_modulation.1": renamed("all_final_layer.2-1.adaLN_modulation.1"),
    },
)

_ERNIE_IMAGE = LayerNames(
    layers=(
        *_under("layers.*.self_attention", (*_QKV, "to_out.0")),
        *_under("layers.*.mlp", ("gate_proj", "up_proj", "linear_fc2")),
        *_under("time_embedding", _EMBEDDER),
        *("x_embedder.proj", "text_proj", "adaLN_modulation.1", "final_norm.linear", "final_linear"),
    )
)

_IDEOGRAM4_BLOCK = "layers.*"
_IDEOGRAM4 = LayerNames(
    layers=(
        *_under(f"{_IDEOGRAM4_BLOCK}.attention", (*_QKV, "to_out.0")),
        *_under(_IDEOGRAM4_BLOCK, (*_FEED_FORWARD_GATED, "adaln_modulation")),
        *("input_proj", "llm_cond_proj", "t_embedding.mlp_in", "t_embedding.mlp_out", "adaln_proj"),
        *("final_layer.linear", "final_layer.adaln_modulation"),
    ),
    kohya={
        f"{_IDEOGRAM4_BLOCK}.attention.qkv": fused(*_under(f"{_IDEOGRAM4_BLOCK}.attention", _QKV)),
        f"{_IDEOGRAM4_BLOCK}.attention.o": renamed(f"{_IDEOGRAM4_BLOCK}.attention.to_out.0"),
    },
)

_KREA2_LAYERS = (*_under("attn", (*_QKV, "to_gate", "to_out.0")), *_under("ff", ("gate", "up", "down")))
_KREA2_BLOCKS = {
    "blocks.*": _DOUBLE,
    "txtfusion.layerwise_blocks.*": "text_fusion.layerwise_blocks.*",
    "txtfusion.refiner_blocks.*": "text_fusion.refiner_blocks.*",
}
_KREA2_OTHERS = {
    "first": "img_in",
    "tmlp.0": "time_embed.linear_1",
    "tmlp.2": "time_embed.linear_2",
    "tproj.1": "time_mod_proj",
    "txtmlp.1": "txt_in.linear_1",
    "txtmlp.3": "txt_in.linear_2",
    "txtfusion.projector": "text_fusion.projector",
    "last.linear": "final_layer.linear",
}
_KREA2 = LayerNames(
    layers=(
        *(f"{block}.{layer}" for block in _KREA2_BLOCKS.values() for layer in _KREA2_LAYERS),
        *_KREA2_OTHERS.values(),
    ),
    kohya={
        **_renamed(
            _KREA2_BLOCKS,
            {
                **{f"attn.w{part}": f"attn.to_{part}" for part in "qkv"},
                "attn.gate": "attn.to_gate",
                "attn.wo": "attn.to_out.0",
                **{f"mlp.{part}": f"ff.{part}" for part in ("gate", "up", "down")},
            },
        ),
        **{name: renamed(layer) for name, layer in _KREA2_OTHERS.items()},
    },
)

_ATTENTIONS = tuple(f"{part}.{layer}" for part in ("attn1", "attn2") for layer in (*_QKV, "to_out.0"))
_TIME = ("time_embed.emb.timestep_embedder.linear_1", "time_embed.emb.timestep_embedder.linear_2")
_CAPTIONS = _under("caption_projection", _EMBEDDER)
_LTX_VIDEO = LayerNames(
    layers=(
        *_under(_DOUBLE, (*_ATTENTIONS, "ff.net.0.proj", "ff.net.2")),
        *(*_TIME, "time_embed.linear", *_CAPTIONS, "proj_in", "proj_out"),
    ),
    kohya={
        "patchify_proj": renamed("proj_in"),
        "adaln_single.linear": renamed("time_embed.linear"),
        **{layer.replace("time_embed", "adaln_single"): renamed(layer) for layer in _TIME},
    },
)

_SANA = LayerNames(
    layers=(
        *_under(_DOUBLE, (*_ATTENTIONS, "ff.conv_inverted", "ff.conv_depth", "ff.conv_point")),
        *(*_TIME, "time_embed.linear", *_CAPTIONS, "patch_embed.proj", "proj_out"),
    )
)

_SD3 = LayerNames(
    layers=(
        *_under(_DOUBLE, (*_JOINT_ATTENTION, *_FLUX_FEED_FORWARD, "norm1.linear", "norm1_context.linear")),
        *_under(f"{_DOUBLE}.attn2", (*_QKV, "to_out.0")),
        *_under("time_text_embed.timestep_embedder", _EMBEDDER),
        *_under("time_text_embed.text_embedder", _EMBEDDER),
        *("pos_embed.proj", "context_embedder", "norm_out.linear", "proj_out"),
    ),
    kohya={
        "joint_blocks.*.x_block.attn.qkv": fused(*_under(f"{_DOUBLE}.attn", _QKV)),
        "joint_blocks.*.x_block.attn2.qkv": fused(*_under(f"{_DOUBLE}.attn2", _QKV)),
        "joint_blocks.*.context_block.attn.qkv": fused(*_under(f"{_DOUBLE}.attn", _ADDED_QKV)),
        **_renamed(
            {"joint_blocks.*.x_block": _DOUBLE},
            {
                "attn.proj": "attn.to_out.0",
                "attn2.proj": "attn2.to_out.0",
                "mlp.fc1": "ff.net.0.proj",
                "mlp.fc2": "ff.net.2",
                "adaLN_modulation.1": "norm1.linear",
            },
        ),
        **_renamed(
            {"joint_blocks.*.context_block": _DOUBLE},
            {
                "attn.proj": "attn.to_add_out",
                "mlp.fc1": "ff_context.net.0.proj",
                "mlp.fc2": "ff_context.net.2",
            },
        ),
        # Of the last block it has scale and shift only.
        "joint_blocks.*.context_block.adaLN_modulation.1": Original(
            (f"{_DOUBLE}.norm1_context.linear",), halves_swapped=True
        ),
        **_renamed(
            {
                "t_embedder.mlp": "time_text_embed.timestep_embedder",
                "y_embedder.mlp": "time_text_embed.text_embedder",
            },
            {"0": "linear_1", "2": "linear_2"},
        ),
        "x_embedder.proj": renamed("pos_embed.proj"),
        "final_layer.linear": renamed("proj_out"),
        "final_layer.adaLN_modulation.1": _LAST_NORM,
    },
)

_RESNET = {
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_TRANSFORMER = (
    *("proj_in", "proj_out"),
    *_under("transformer_blocks.*", (*_ATTENTIONS, "ff.net.0.proj", "ff.net.2")),
)
_SDXL_RESNETS = {
    **{f"input_blocks.{3 * i + j + 1}.0": f"down_blocks.{i}.resnets.{j}" for i in range(3) for j in range(2)},
    **{f"output_blocks.{3 * i + j}.0": f"up_blocks.{i}.resnets.{j}" for i in range(3) for j in range(3)},
    "middle_block.0": "mid_block.resnets.0",
    "middle_block.2": "mid_block.resnets.1",
}
_SDXL_TRANSFORMERS = {
    **{
        f"input_blocks.{3 * i + j + 1}.1": f"down_blocks.{i}.attentions.{j}" for i in (1, 2) for j in range(2)
    },
    **{f"output_blocks.{3 * i + j}.1": f"up_blocks.{i}.attentions.{j}" for i in (0, 1) for j in range(3)},
    "middle_block.1": "mid_block.attentions.0",
}
_UNET_TRANSFORMERS = ("down_blocks.*.attentions.*", "up_blocks.*.attentions.*", "mid_block.attentions.*")
_SDXL_UNET = LayerNames(
    layers=(
        *(f"{block}.{layer}" for block in _UNET_TRANSFORMERS for layer in _TRANSFORMER),
        *(
            f"{block}.resnets.*.{layer}"
            for block in ("down_blocks.*", "up_blocks.*", "mid_block")
            for layer in _RESNET.values()
        ),
        *("down_blocks.*.downsamplers.*.conv", "up_blocks.*.upsamplers.*.conv", "conv_in", "conv_out"),
        *_under("time_embedding", _EMBEDDER),
        *_under("add_embedding", _EMBEDDER),
    ),
    kohya={
        **_renamed(_SDXL_RESNETS, _RESNET),
        **_renamed(_SDXL_TRANSFORMERS, {layer: layer for layer in _TRANSFORMER}),
        **{f"input_blocks.{3 * i + 3}.0.op": renamed(f"down_blocks.{i}.downsamplers.0.conv") for i in (0, 1)},
        **{f"output_blocks.{3 * i + 2}.2.conv": renamed(f"up_blocks.{i}.upsamplers.0.conv") for i in (0, 1)},
        **_renamed({"time_embed": "time_embedding"}, {"0": "linear_1", "2": "linear_2"}),
        **_renamed({"label_emb.0": "add_embedding"}, {"0": "linear_1", "2": "linear_2"}),
        "input_blocks.0.0": renamed("conv_in"),
        "out.2": renamed("conv_out"),
    },
    others={  # diffusers' own before peft
        f"{block}.transformer_blocks.*.{part}.processor.{layer.removesuffix('.0')}_lora": renamed(
            f"{block}.transformer_blocks.*.{part}.{layer}"
        )
        for block in _UNET_TRANSFORMERS
        for part in ("attn1", "attn2")
        for layer in (*_QKV, "to_out.0")
    },
)

_CLIP_LAYERS = (*_under("self_attn", ("q_proj", "k_proj", "v_proj", "out_proj")), "mlp.fc1", "mlp.fc2")
_CLIP_BLOCK = "text_model.encoder.layers.*"
_CLIP = LayerNames(
    layers=(*_under(_CLIP_BLOCK, _CLIP_LAYERS), "text_projection"),
    others={
        # without the name that transformers 5 left out
        **{f"encoder.layers.*.{layer}": renamed(f"{_CLIP_BLOCK}.{layer}") for layer in _CLIP_LAYERS},
        # diffusers' own before peft
        **{
            f"{_CLIP_BLOCK}.self_attn.to_{part}_lora": renamed(f"{_CLIP_BLOCK}.self_attn.{part}_proj")
            for part in ("q", "k", "v", "out")
        },
    },
)

FLUX: LoraLayers = {"transformer": _FLUX, "text_encoder": _CLIP}
CHROMA: LoraLayers = {"transformer": _CHROMA}
FLUX2: LoraLayers = {"transformer": _FLUX2}
QWEN_IMAGE: LoraLayers = {"transformer": _QWEN_IMAGE}
COGVIDEOX: LoraLayers = {"transformer": COGVIDEOX_LAYERS}
ANIMA: LoraLayers = {"transformer": ANIMA_LAYERS}
ERNIE_IMAGE: LoraLayers = {"transformer": _ERNIE_IMAGE}
QWEN_IMAGE_21: LoraLayers = {"transformer": _QWEN_IMAGE_21}
IDEOGRAM4: LoraLayers = {"transformer": _IDEOGRAM4}
KREA2: LoraLayers = {"transformer": _KREA2}
Z_IMAGE: LoraLayers = {"transformer": _Z_IMAGE}
LTX_VIDEO: LoraLayers = {"transformer": _LTX_VIDEO}
SANA: LoraLayers = {"transformer": _SANA}
WAN: LoraLayers = {"transformer": WAN_LAYERS}
SD3: LoraLayers = {"transformer": _SD3}
SDXL: LoraLayers = {"unet": _SDXL_UNET, "text_encoder": _CLIP, "text_encoder_2": _CLIP}
