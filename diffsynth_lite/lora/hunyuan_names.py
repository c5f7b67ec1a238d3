"""This file lists the layers of HunyuanVideo that a LoRA may be on, and what else files call them.

Sources: the modules of diffusers' models, its ``single_file_utils.py`` and
``scripts/convert_hunyuan_video1_5_to_diffusers.py``, which have the names of Tencent's repositories;
``comfy/ldm/hunyuan_video/model.py`` of ComfyUI; musubi-tuner's
``networks/convert_hunyuan_video_1_5_lora_to_comfy.py``. The blocks are those of FLUX.1.
"""

from collections.abc import Iterable, Mapping

from diffsynth_lite.lora.known_names import FLUX
from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, Original, fused, renamed

_DOUBLE, _OTHER_DOUBLE = "transformer_blocks.*", "double_blocks.*"
_REFINER, _OTHER_REFINER = (
    "context_embedder.token_refiner.refiner_blocks.*",
    "txt_in.individual_token_refiner.blocks.*",
)
_TEXT, _OTHER_TEXT = "context_embedder.time_text_embed", "txt_in"
_QKV, _ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
_TWO = ("linear_1", "linear_2")


def _under(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _renamed(other: str, ours: str, names: Mapping[str, str]) -> dict[str, Original]:
    """Layers under a name by their other names, under another."""
    return {f"{other}.{name}": renamed(f"{ours}.{layer}") for name, layer in names.items()}


_OF_FLUX = FLUX["transformer"]
_DOUBLE_LAYERS = tuple(layer for layer in _OF_FLUX.layers if layer.startswith(_DOUBLE))
_IN_OUT = {"in_layer": "linear_1", "out_layer": "linear_2"}
_MLP = {"mlp.0": "linear_1", "mlp.2": "linear_2"}
_FEED_FORWARD = {"mlp.0": "ff.net.0.proj", "mlp.2": "ff.net.2"}
_COMFYUI = {
    **{
        name: place
        for name, place in _OF_FLUX.kohya.items()
        if name.startswith((_OTHER_DOUBLE, "final_layer."))
    },
    f"{_OTHER_REFINER}.self_attn.qkv": fused(*_under(f"{_REFINER}.attn", _QKV)),
    f"{_OTHER_REFINER}.self_attn.proj": renamed(f"{_REFINER}.attn.to_out.0"),
    f"{_OTHER_REFINER}.adaLN_modulation.1": renamed(f"{_REFINER}.norm_out.linear"),
    **_renamed(_OTHER_REFINER, _REFINER, _FEED_FORWARD),
    **_renamed(f"{_OTHER_TEXT}.t_embedder", f"{_TEXT}.timestep_embedder", _IN_OUT),
    **_renamed(f"{_OTHER_TEXT}.c_embedder", f"{_TEXT}.text_embedder", _IN_OUT),
    f"{_OTHER_TEXT}.input_embedder": renamed("context_embedder.proj_in"),
    "img_in.proj": renamed("x_embedder.proj"),
}
_TENCENT = {
    **_renamed(
        _OTHER_DOUBLE,
        _DOUBLE,
        {
            "img_mlp.fc1": "ff.net.0.proj",
            "img_mlp.fc2": "ff.net.2",
            "txt_mlp.fc1": "ff_context.net.0.proj",
            "txt_mlp.fc2": "ff_context.net.2",
            "img_mod.linear": "norm1.linear",
            "txt_mod.linear": "norm1_context.linear",
        },
    ),
    **_renamed(_OTHER_REFINER, _REFINER, {"mlp.fc1": "ff.net.0.proj", "mlp.fc2": "ff.net.2"}),
    **_renamed(f"{_OTHER_TEXT}.t_embedder", f"{_TEXT}.timestep_embedder", _MLP),
    **_renamed(f"{_OTHER_TEXT}.c_embedder", f"{_TEXT}.text_embedder", {layer: layer for layer in _TWO}),
}
_TEXT_LAYERS = (
    *_under(_REFINER, (*_under("attn", (*_QKV, "to_out.0")), "ff.net.0.proj", "ff.net.2", "norm_out.linear")),
    *_under(f"{_TEXT}.timestep_embedder", _TWO),
    *_under(f"{_TEXT}.text_embedder", _TWO),
    "context_embedder.proj_in",
)

_PARTS_OF_FLUX = ("single_blocks.", "time_in.", "guidance_in.", "vector_in.")
_HUNYUAN_VIDEO = LayerNames(
    layers=(
        *(layer for layer in _OF_FLUX.layers if layer not in ("x_embedder", "context_embedder")),
        *_TEXT_LAYERS,
        "x_embedder.proj",
    ),
    kohya={
        **_COMFYUI,
        **{name: place for name, place in _OF_FLUX.kohya.items() if name.startswith(_PARTS_OF_FLUX)},
    },
    others={
        **_TENCENT,
        "single_blocks.*.modulation.linear": renamed("single_transformer_blocks.*.norm.linear"),
        **_renamed("time_in", "time_text_embed.timestep_embedder", _MLP),
        **_renamed("guidance_in", "time_text_embed.guidance_embedder", _MLP),
    },
    # FLUX.1 has 19 and 38 of these, of the same width.
    num_blocks={"transformer_blocks": 20, "single_transformer_blocks": 40},
)

_HUNYUAN_VIDEO_15 = LayerNames(
    layers=(
        *(*_DOUBLE_LAYERS, *_TEXT_LAYERS),
        *_under("context_embedder_2", (*_TWO, "linear_3")),
        *_under("image_embedder", _TWO),
        *_under("time_embed.timestep_embedder", _TWO),
        *("x_embedder.proj", "norm_out.linear", "proj_out"),
    ),
    kohya={
        **_COMFYUI,
        **_renamed("time_in", "time_embed.timestep_embedder", _IN_OUT),
        **_renamed("byt5_in", "context_embedder_2", {f"fc{place}": f"linear_{place}" for place in (1, 2, 3)}),
        **_renamed("vision_in.proj", "image_embedder", {"1": "linear_1", "3": "linear_2"}),
    },
    others={
        **_TENCENT,
        **_renamed(
            _OTHER_DOUBLE,
            f"{_DOUBLE}.attn",
            {
                f"{stream}_attn_{name}": layer
                for stream, layers in (("img", _QKV), ("txt", _ADDED_QKV))
                for name, layer in zip("qkv", layers, strict=True)
            },
        ),
        **_renamed("time_in", "time_embed.timestep_embedder", _MLP),
    },
)

HUNYUAN_VIDEO: LoraLayers = {"transformer": _HUNYUAN_VIDEO}
HUNYUAN_VIDEO_15: LoraLayers = {"transformer": _HUNYUAN_VIDEO_15}
