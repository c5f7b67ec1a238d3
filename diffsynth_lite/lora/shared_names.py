"""This file has names of layers that several families share: those of attention, FLUX.1's blocks, and CLIP.

Sources: the modules of diffusers' models, and its ``single_file_utils.py``, which turns original checkpoints
into these; of kohya's trainers the names that they write (sd-scripts ``networks/``, musubi-tuner
``networks/`` and ``convert_lora.py``). A family's own file lists its layers.
"""

from diffsynth_lite.lora.layer_names import LayerNames, Original, fused, renamed, under

QKV = ("to_q", "to_k", "to_v")
ADDED_QKV = ("add_q_proj", "add_k_proj", "add_v_proj")
EMBEDDER = ("linear_1", "linear_2")
DOUBLE, SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
ATTENTIONS = tuple(f"{part}.{layer}" for part in ("attn1", "attn2") for layer in (*QKV, "to_out.0"))
JOINT_PROJECTIONS = (*QKV, "to_out.0", *ADDED_QKV, "to_add_out")
"""Of an attention over text and image, in which each has layers of its own."""
JOINT_ATTENTION = under("attn", JOINT_PROJECTIONS)
FLUX_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
FLUX_SINGLE = (*under("attn", QKV), "proj_mlp", "proj_out")
FLUX_BLOCKS = {
    "double_blocks.*.img_attn.qkv": fused(*under(f"{DOUBLE}.attn", QKV)),
    "double_blocks.*.txt_attn.qkv": fused(*under(f"{DOUBLE}.attn", ADDED_QKV)),
    "double_blocks.*.img_attn.proj": renamed(f"{DOUBLE}.attn.to_out.0"),
    "double_blocks.*.txt_attn.proj": renamed(f"{DOUBLE}.attn.to_add_out"),
    "double_blocks.*.img_mlp.0": renamed(f"{DOUBLE}.ff.net.0.proj", 4),
    "double_blocks.*.img_mlp.2": renamed(f"{DOUBLE}.ff.net.2"),
    "double_blocks.*.txt_mlp.0": renamed(f"{DOUBLE}.ff_context.net.0.proj", 4),
    "double_blocks.*.txt_mlp.2": renamed(f"{DOUBLE}.ff_context.net.2"),
    "single_blocks.*.linear1": fused(*under(f"{SINGLE}.attn", QKV), f"{SINGLE}.proj_mlp", rows=(1, 1, 1, 4)),
    "single_blocks.*.linear2": renamed(f"{SINGLE}.proj_out"),
    "img_in": renamed("x_embedder"),
    "txt_in": renamed("context_embedder"),
    "final_layer.linear": renamed("proj_out"),
}
LAST_NORM = Original(("norm_out.linear",), halves_swapped=True)
ORIGINAL_EMBEDDER = {"in_layer": "linear_1", "out_layer": "linear_2"}

_CLIP_LAYERS = (*under("self_attn", ("q_proj", "k_proj", "v_proj", "out_proj")), "mlp.fc1", "mlp.fc2")
_CLIP_BLOCK = "text_model.encoder.layers.*"
CLIP = LayerNames(
    layers=(*under(_CLIP_BLOCK, _CLIP_LAYERS), "text_projection"),
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
