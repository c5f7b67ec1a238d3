"""This file says how LoRA files call the layers that they are on, and where they keep alpha.

A layer has one name here, diffusers' own behind that of its component: ``transformer.blocks.0.attn1.to_q``.
Of each family one spelling is right in diffusers and in ComfyUI at the same strength; its file says which.

Sources: ComfyUI's ``comfy/lora.py`` and ``comfy/utils.py`` for the names that it takes, and that it scales an
update by ``alpha`` over rank where a file has a tensor of that name, and by 1 where not, whatever is in the
metadata; ``lora_conversion_utils.py`` of diffusers for those that its pipelines take.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

_COMPOUNDS = (
    *("adaLN_modulation", "add_embedding", "add_k_proj", "add_q_proj", "add_v_proj", "all_final_layer"),
    *("all_x_embedder", "cap_embedder", "caption_embedder", "caption_projection"),
    *("condition_embedder", "context_embedder", "context_refiner", "conv_in", "conv_out", "conv_shortcut"),
    *("cross_attn", "distilled_guidance_layer", "double_stream_modulation_img"),
    *("double_stream_modulation_txt", "down_blocks", "feed_forward", "ff_context", "guidance_embedder"),
    *("image_embedder", "img_emb", "img_in", "img_mlp", "img_mod", "in_proj", "k_img", "k_proj", "label_emb"),
    *(
        "linear_1",
        "linear_2",
        "linear_in",
        "linear_out",
        "mid_block",
        "noise_refiner",
        "norm1_context",
        "norm_out",
    ),
    *("out_proj", "proj_in", "proj_mlp", "proj_out", "q_proj", "self_attn", "single_stream_modulation"),
    *("single_transformer_blocks", "t_embedder", "text_embedder", "text_embedding", "text_model"),
    *("text_projection", "time_emb_proj", "time_embed", "time_embedder", "time_embedding"),
    *("time_guidance_embed", "time_proj", "time_projection", "time_text_embed", "timestep_embedder"),
    *("to_add_out", "to_k", "to_out", "to_q", "to_qkv_mlp_proj", "to_v", "transformer_blocks", "txt_in"),
    *("txt_mlp", "txt_mod", "up_blocks", "v_img", "v_proj", "x_embedder"),
)
"""Parts of names that have a ``_`` of their own, in models of diffusers and in ComfyUI's."""
_PART = re.compile("|".join([*sorted(map(re.escape, _COMPOUNDS), key=len, reverse=True), "[^_]+"]))


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """One way to call the layers in a LoRA file, and to keep the strength of their update.

    Attributes:
        prefixes: what stands for each component in the file; none is as here, and so are the names.
        renames: whole parts of names here, and what they are in the file; applied in order.
        is_flat: whether the file has ``_`` between the parts of a name, and alpha in a tensor of its own, as
            kohya's have, beside ``lora_down`` and ``lora_up``; else alpha is folded into ``lora_B``, so that
            it is the rank.
        unknown_to_comfyui: beginnings of names, behind that of the component, of layers for which ComfyUI has
            no name in this spelling; None where it is not known what it takes.
    """

    prefixes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    renames: tuple[tuple[str, str], ...] = ()
    is_flat: bool = False
    unknown_to_comfyui: tuple[str, ...] | None = None

    def key(self, layer: str) -> str:
        """What the file calls a layer: what its tensors' names begin with, without the last dot."""
        component, _, name = layer.partition(".")
        for ours, theirs in self.renames:
            name = _renamed(name, ours, theirs)
        parts = [self.prefixes.get(component, component), name]
        return "_".join(parts).replace(".", "_") if self.is_flat else ".".join(parts)

    def layer(self, key: str) -> str | None:
        """The layer that the file calls so; None where it begins as none of this spelling's."""
        if not self.prefixes:
            return key
        separator = "_" if self.is_flat else "."
        components = {f"{theirs}{separator}": ours for ours, theirs in self.prefixes.items()}
        prefix = next(filter(key.startswith, components), None)
        if prefix is None:
            return None
        name = key.removeprefix(prefix)
        if self.is_flat:
            name = ".".join(_PART.findall(name))
        for ours, theirs in reversed(self.renames):
            name = _renamed(name, theirs, ours)
        return f"{components[prefix]}.{name}"

    @property
    def endings(self) -> tuple[str, str]:
        """What the names of a layer's two tensors end in: (rank, inputs), then (outputs, rank)."""
        names = ("lora_down", "lora_up") if self.is_flat else ("lora_A", "lora_B")
        return f".{names[0]}.weight", f".{names[1]}.weight"

    def alpha(self, layer: str) -> str | None:
        """Name of the tensor with a layer's alpha, which has no axis; None where alpha is folded."""
        return f"{self.key(layer)}.alpha" if self.is_flat else None

    def in_comfyui(self, layer: str) -> bool:
        """Whether ComfyUI is known to take the layer by this name."""
        _, _, name = layer.partition(".")
        return self.unknown_to_comfyui is not None and not name.startswith(self.unknown_to_comfyui)


def _renamed(name: str, old: str, new: str) -> str:
    """A dotted name with whole parts in it, one or more, called otherwise."""
    return f".{name}.".replace(f".{old}.", f".{new}.").strip(".")


DIFFUSERS = Spelling()
"""Diffusers' own names; where ComfyUI takes them is for a family to say (:func:`taken_by_comfyui`)."""

WAN_NAMES = Spelling(
    prefixes=MappingProxyType({"transformer": "diffusion_model"}),
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
"""The names of the models' own repository, which ComfyUI has, too."""

LTX_VIDEO_NAMES = Spelling(
    prefixes=MappingProxyType({"transformer": "diffusion_model"}),
    unknown_to_comfyui=("proj_in", "time_embed"),
)
"""Diffusers' names but for the prefix; those of the two layers would be others in ComfyUI."""

SDXL_NAMES = Spelling(
    prefixes=MappingProxyType(
        {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
    ),
    renames=(("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2")),
    is_flat=True,
    unknown_to_comfyui=(),
)
"""kohya's: diffusers' names of the UNet, but for two that its pipeline would not know again, and those of
CLIP as transformers had them before version 5."""


def taken_by_comfyui(*, but: tuple[str, ...] = ()) -> Spelling:
    """Diffusers' own names, of a family whose layers ComfyUI takes by these.

    Args:
        but: beginnings of the names of those that it does not.
    """
    return replace(DIFFUSERS, unknown_to_comfyui=but)
