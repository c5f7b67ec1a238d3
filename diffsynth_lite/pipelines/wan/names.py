"""This file has the names of Wan's layers: those of the models' own repository, which ComfyUI has, too."""

from diffsynth_lite.lora.layer_names import LayerNames, LoraLayers, under
from diffsynth_lite.lora.shared_names import ATTENTIONS, EMBEDDER
from diffsynth_lite.lora.spelling import Spelling

WAN_NAMES = Spelling(
    prefixes={"transformer": "diffusion_model"},
    renames=(
        ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        ("condition_embedder.time_proj", "time_projection.1"),
        ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
        ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
        ("proj_out", "head.head"),
        ("attn1", "self_attn"),
        ("attn2", "cross_attn"),
        ("add_k_proj", "k_img"),
        ("add_v_proj", "v_img"),
        ("to_q", "q"),
        ("to_k", "k"),
        ("to_v", "v"),
        ("to_out.0", "o"),
        ("ffn.net.0.proj", "ffn.0"),
        ("ffn.net.2", "ffn.2"),
    ),
    unknown_to_comfyui=(),
)

WAN_LAYERS: LoraLayers = {
    "transformer": LayerNames.spelled(
        WAN_NAMES,
        (
            *under(
                "blocks.*",
                (*ATTENTIONS, "attn2.add_k_proj", "attn2.add_v_proj", "ffn.net.0.proj", "ffn.net.2"),
            ),
            *under("condition_embedder.time_embedder", EMBEDDER),
            *under("condition_embedder.text_embedder", EMBEDDER),
            *under("condition_embedder.image_embedder", ("ff.net.0.proj", "ff.net.2")),
            *("condition_embedder.time_proj", "patch_embedding", "proj_out"),
        ),
    )
}
