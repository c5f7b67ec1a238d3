"""This file spells the names of layers as LoRA files do, which also decides where alpha is kept.

A layer has one name here, its component and diffusers' own name: ``transformer.blocks.0.attn1.to_q``. For
each family one spelling is right in diffusers and in ComfyUI at the same strength; its file names it.

Sources: ComfyUI's ``comfy/lora.py``, ``comfy/utils.py`` and, of CogVideoX, ``comfy/ldm/cogvideo/model.py``
for the names that it takes, and that it scales an update by ``alpha`` over rank where a file has a tensor of
that name, and by 1 where not, whatever is in the metadata; for those that diffusers' pipelines take, its
``lora_conversion_utils.py``.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """One way to name the layers in a LoRA file, and to store the strength of their update.

    Attributes:
        prefixes: the file's name for each component; without one the name here is taken.
        renames: whole parts of names here, and in the file; applied in order. ``*`` is any one part.
        is_flat: whether the file has ``_`` between the parts of a name, and alpha in a tensor of its own, as
            kohya's have, with ``lora_down`` and ``lora_up``; else alpha is folded into ``lora_B``, so that it
            is the rank.
        unknown_to_comfyui: beginnings of names (without the component) of layers for which ComfyUI has no
            name in this spelling; None where it is not known which names it takes.
        is_joined_in_comfyui: whether ComfyUI has several of the layers as one, so that it takes a LoRA that
            is joined for them, by kohya's names, and no file is right in both programs.
        for_comfyui: the spelling that ComfyUI takes, where diffusers takes another.
        comfyui_takes_kohya_names: whether ComfyUI takes all layers by the names of kohya's trainers, too.
    """

    prefixes: Mapping[str, str] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    is_flat: bool = False
    unknown_to_comfyui: tuple[str, ...] | None = None
    is_joined_in_comfyui: bool = False
    for_comfyui: "Spelling | None" = None
    comfyui_takes_kohya_names: bool = True

    @property
    def is_converted_for_comfyui(self) -> bool:
        """Whether ComfyUI takes another file than diffusers, which can be made of it."""
        return self.is_joined_in_comfyui or self.for_comfyui is not None

    def key(self, layer: str) -> str:
        """Name of a layer in the file: the start of its tensors' names, without the last dot."""
        component, _, name = layer.partition(".")
        for ours, theirs in self.renames:
            name = _renamed(name, ours, theirs)
        parts = [self.prefixes.get(component, component), name]
        return "_".join(parts).replace(".", "_") if self.is_flat else ".".join(parts)

    @property
    def endings(self) -> tuple[str, str]:
        """Ends of the names of a layer's two tensors: (rank, inputs), then (outputs, rank)."""
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
    """A dotted name with some of its whole parts replaced."""
    if "*" not in old:
        return f".{name}.".replace(f".{old}.", f".{new}.").strip(".")
    pattern = re.escape(old).replace(r"\*", r"([^.]+)")
    return re.sub(rf"(?<![^.]){pattern}(?![^.])", new.replace("*", r"\1"), name)


DIFFUSERS = Spelling()
"""Diffusers' own names; a family whose layers ComfyUI takes by them has :func:`taken_by_comfyui`."""

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
"""The names of the models' own repository, which ComfyUI has, too."""

WAN_VACE_IN_COMFYUI = replace(
    WAN_NAMES,
    renames=(
        ("vace_blocks.*.proj_in", "vace_blocks.*.before_proj"),
        ("vace_blocks.*.proj_out", "vace_blocks.*.after_proj"),
        *WAN_NAMES.renames,
    ),
)
"""Also the names of VACE's further blocks, which diffusers' pipeline does not load."""
WAN_VACE_NAMES = replace(DIFFUSERS, unknown_to_comfyui=("",), for_comfyui=WAN_VACE_IN_COMFYUI)
"""Diffusers' own names, of Wan VACE."""

COGVIDEOX_IN_COMFYUI = Spelling(
    prefixes={"transformer": "diffusion_model"},
    renames=(
        ("transformer_blocks", "blocks"),
        ("attn1.to_q", "q"),
        ("attn1.to_k", "k"),
        ("attn1.to_v", "v"),
        ("attn1.to_out.0", "attn_out"),
        ("ff.net.0.proj", "ff_proj"),
        ("ff.net.2", "ff_out"),
        ("time_embedding.linear_1", "time_embedding_linear_1"),
        ("time_embedding.linear_2", "time_embedding_linear_2"),
    ),
    unknown_to_comfyui=(),
)
"""The names of ComfyUI's own model, which diffusers' pipeline does not load."""
COGVIDEOX_NAMES = replace(DIFFUSERS, unknown_to_comfyui=("",), for_comfyui=COGVIDEOX_IN_COMFYUI)
"""Diffusers' own names, of CogVideoX."""

ANIMA_NAMES = Spelling(
    prefixes={"transformer": "diffusion_model"},
    renames=(
        ("transformer_blocks", "blocks"),
        ("norm1.linear_1", "adaln_modulation_self_attn.1"),
        ("norm1.linear_2", "adaln_modulation_self_attn.2"),
        ("norm2.linear_1", "adaln_modulation_cross_attn.1"),
        ("norm2.linear_2", "adaln_modulation_cross_attn.2"),
        ("norm3.linear_1", "adaln_modulation_mlp.1"),
        ("norm3.linear_2", "adaln_modulation_mlp.2"),
        ("attn1", "self_attn"),
        ("attn2", "cross_attn"),
        ("to_q", "q_proj"),
        ("to_k", "k_proj"),
        ("to_v", "v_proj"),
        ("to_out.0", "output_proj"),
        ("ff.net.0.proj", "mlp.layer1"),
        ("ff.net.2", "mlp.layer2"),
        ("norm_out.linear_1", "final_layer.adaln_modulation.1"),
        ("norm_out.linear_2", "final_layer.adaln_modulation.2"),
        ("proj_out", "final_layer.linear"),
        ("time_embed.t_embedder", "t_embedder.1"),
        ("patch_embed.proj", "x_embedder.proj.1"),
    ),
    unknown_to_comfyui=(),
)
"""The names of the models' own repository, which ComfyUI has, too."""

SDXL_NAMES = Spelling(
    prefixes={"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"},
    renames=(("add_embedding.linear_1", "label_emb.0.0"), ("add_embedding.linear_2", "label_emb.0.2")),
    is_flat=True,
    unknown_to_comfyui=(),
)
"""kohya's: diffusers' names of the UNet, except two that its pipeline would not recognize, and those of CLIP
as transformers had them before version 5."""


JOINED_IN_COMFYUI = replace(DIFFUSERS, unknown_to_comfyui=("",), is_joined_in_comfyui=True)
"""Diffusers' own names, of a family whose queries, keys and values are one layer in ComfyUI."""


def taken_by_comfyui(*, but: tuple[str, ...] = (), by_kohya_names: bool = True) -> Spelling:
    """Diffusers' own names, of a family whose layers ComfyUI takes by these.

    Args:
        but: beginnings of the names of those that it does not.
        by_kohya_names: whether it takes them by the names of kohya's trainers, too.
    """
    return replace(DIFFUSERS, unknown_to_comfyui=but, comfyui_takes_kohya_names=by_kohya_names)
