"""This file spells the names of layers as LoRA files do, which also decides where alpha is kept.

A layer has one name here, its component and diffusers' own name: ``transformer.blocks.0.attn1.to_q``. For
each family one spelling is right in diffusers and in ComfyUI at the same strength; its file names it.

Sources: ComfyUI's ``comfy/lora.py`` and ``comfy/utils.py`` for the names that it takes, and that it scales an
update by ``alpha`` over rank where a file has a tensor of that name, and by 1 where not, whatever is in the
metadata; for those that diffusers' pipelines take, its ``lora_conversion_utils.py``.
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

JOINED_IN_COMFYUI = replace(DIFFUSERS, unknown_to_comfyui=("",), is_joined_in_comfyui=True)
"""Diffusers' own names, of a family whose queries, keys and values are one layer in ComfyUI."""


def converted_for_comfyui(spelling: Spelling) -> Spelling:
    """Diffusers' own names, of a family whose layers ComfyUI takes by another spelling only."""
    return replace(DIFFUSERS, unknown_to_comfyui=("",), for_comfyui=spelling)


def taken_by_comfyui(*, but: tuple[str, ...] = (), by_kohya_names: bool = True) -> Spelling:
    """Diffusers' own names, of a family whose layers ComfyUI takes by these.

    Args:
        but: beginnings of the names of those that it does not.
        by_kohya_names: whether it takes them by the names of kohya's trainers, too.
    """
    return replace(DIFFUSERS, unknown_to_comfyui=but, comfyui_takes_kohya_names=by_kohya_names)
