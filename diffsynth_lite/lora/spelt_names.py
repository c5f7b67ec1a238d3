"""This file lists the layers of models that ComfyUI and kohya's trainers call by names of one spelling.

Mostly these are the names of the models' own repositories. Sources: the modules of diffusers' models, and
``spelling.py``.
"""

from collections.abc import Iterable

from diffsynth_lite.lora.layer_names import LayerNames, renamed
from diffsynth_lite.lora.spelling import ANIMA_NAMES, COGVIDEOX_IN_COMFYUI, WAN_NAMES, Spelling

_EMBEDDER = ("linear_1", "linear_2")
_ATTENTIONS = tuple(
    f"{part}.{layer}" for part in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")
)


def _under(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{name}" for name in names)


def _spelt(spelling: Spelling, layers: tuple[str, ...]) -> LayerNames:
    names = {spelling.key(f"transformer.{layer}").partition(".")[2]: renamed(layer) for layer in layers}
    return LayerNames(layers=layers, kohya=names)


ANIMA_LAYERS = _spelt(
    ANIMA_NAMES,
    (
        *_under("transformer_blocks.*", (*_ATTENTIONS, "ff.net.0.proj", "ff.net.2")),
        *(f"transformer_blocks.*.norm{norm}.{layer}" for norm in (1, 2, 3) for layer in _EMBEDDER),
        *_under("time_embed.t_embedder", _EMBEDDER),
        *(*_under("norm_out", _EMBEDDER), "patch_embed.proj", "proj_out"),
    ),
)

COGVIDEOX_LAYERS = _spelt(
    COGVIDEOX_IN_COMFYUI,
    (
        *_under("transformer_blocks.*.attn1", ("to_q", "to_k", "to_v", "to_out.0")),
        *_under("transformer_blocks.*", ("ff.net.0.proj", "ff.net.2", "norm1.linear", "norm2.linear")),
        *_under("time_embedding", _EMBEDDER),
        *("patch_embed.proj", "patch_embed.text_proj", "norm_out.linear", "proj_out"),
    ),
)

WAN_LAYERS = _spelt(
    WAN_NAMES,
    (
        *_under(
            "blocks.*",
            (*_ATTENTIONS, "attn2.add_k_proj", "attn2.add_v_proj", "ffn.net.0.proj", "ffn.net.2"),
        ),
        *_under("condition_embedder.time_embedder", _EMBEDDER),
        *_under("condition_embedder.text_embedder", _EMBEDDER),
        *_under("condition_embedder.image_embedder", ("ff.net.0.proj", "ff.net.2")),
        *("condition_embedder.time_proj", "patch_embedding", "proj_out"),
    ),
)
