"""This file lists the layers of HunyuanVideo 1.5 that a LoRA may be on, and what else files call them.

Sources: the modules of diffusers' model, and its ``scripts/convert_hunyuan_video1_5_to_diffusers.py``, which
has the names of Tencent's repository; musubi-tuner's ``networks/convert_hunyuan_video_1_5_lora_to_comfy.py``.
"""

from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, renamed_in, under
from diffsynth_lite.lora.shared_names import ADDED_QKV, DOUBLE, EMBEDDER, ORIGINAL_EMBEDDER, QKV
from diffsynth_lite.pipelines.hunyuan_video import (
    BLOCKS_IN_COMFYUI,
    DOUBLE_LAYERS,
    MLP,
    OTHER_DOUBLE,
    TENCENT,
    TEXT_LAYERS,
)

_LAYERS = LayerNames(
    layers=(
        *(*DOUBLE_LAYERS, *TEXT_LAYERS),
        *under("context_embedder_2", (*EMBEDDER, "linear_3")),
        *under("image_embedder", EMBEDDER),
        *under("time_embed.timestep_embedder", EMBEDDER),
        *("x_embedder.proj", "norm_out.linear", "proj_out"),
    ),
    kohya={
        **BLOCKS_IN_COMFYUI,
        **renamed_in({"time_in": "time_embed.timestep_embedder"}, ORIGINAL_EMBEDDER),
        **renamed_in(
            {"byt5_in": "context_embedder_2"}, {f"fc{place}": f"linear_{place}" for place in (1, 2, 3)}
        ),
        **renamed_in({"vision_in.proj": "image_embedder"}, {"1": "linear_1", "3": "linear_2"}),
    },
    others={
        **TENCENT,
        **renamed_in(
            {OTHER_DOUBLE: f"{DOUBLE}.attn"},
            {
                f"{stream}_attn_{name}": layer
                for stream, layers in (("img", QKV), ("txt", ADDED_QKV))
                for name, layer in zip("qkv", layers, strict=True)
            },
        ),
        **renamed_in({"time_in": "time_embed.timestep_embedder"}, MLP),
    },
)

HUNYUAN_VIDEO_15_LAYERS: LoraLayers = {"transformer": _LAYERS}
