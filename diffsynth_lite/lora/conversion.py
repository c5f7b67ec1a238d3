"""This file writes a LoRA with the names of another program, and measures how far its updates changed."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors.torch import save_file
from torch import Tensor

from diffsynth_lite.errors import UserError, join_names
from diffsynth_lite.files import replacing
from diffsynth_lite.lora.layer_names import LayerNames, Original, join
from diffsynth_lite.lora.metadata import add_metadata
from diffsynth_lite.lora.reading import LoraContents, contents_of, known_pairs
from diffsynth_lite.lora.spelling import DIFFUSERS, Spelling
from diffsynth_lite.lora.updates import LoraPair, tensors_of

Target: TypeAlias = Literal["diffusers", "comfyui", "kohya"]

_KOHYA_PREFIXES = MappingProxyType(
    {
        "transformer": "lora_unet",
        "unet": "lora_unet",
        "text_encoder": "lora_te1",
        "text_encoder_2": "lora_te2",
    }
)
_STALE = (LORA_ADAPTER_METADATA_KEY, "sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")
"""Metadata that depend on the names and values of tensors."""
_DIM, _NETWORK_ALPHA = "ss_network_dim", "ss_network_alpha"


@dataclass(frozen=True, kw_only=True)
class FamilyNames:
    """Names of the layers of a model family in files.

    Attributes:
        layers: names by component, the denoiser first.
    """

    layers: Mapping[str, LayerNames]
    comfyui: Spelling


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A LoRA in the names of another program.

    Attributes:
        difference: largest change of a layer's update, relative to its norm.
    """

    tensors: dict[str, Tensor]
    contents: LoraContents
    difference: float
    layer: str


def convert(
    contents: LoraContents,
    names: FamilyNames,
    to: Target,
    file: Path,
    *,
    alpha: float | None = None,
    dtype: torch.dtype | None = None,
) -> Conversion:
    """Give a LoRA the names of another program. The update of each layer stays the same.

    Args:
        to: diffusers' names and those that ComfyUI takes with alpha folded where a file has no tensor for it,
            kohya's with a tensor for it. Where ComfyUI has several layers as one, it takes only kohya's.
        alpha: new alpha; None leaves it, or restores the alpha of training if that was folded, is in the
            metadata, and can be restored without rounding.
    """
    before = known_pairs(contents, names.layers)
    if to == "comfyui" and names.comfyui.is_joined_in_comfyui:
        to = "kohya"
    has_alphas = to == "kohya" or (to == "comfyui" and names.comfyui.is_flat)
    if alpha and not has_alphas:
        raise UserError(
            f"--alpha: a file for {to} has no place for it here; leave it out, or write --to kohya"
        )
    alphas = dict.fromkeys(before, alpha) if alpha else _trained_alphas(before, contents.metadata)
    if has_alphas and not alpha:
        # An alpha that differs by a power of two needs no rounding; any other is not restored.
        is_exact = {
            layer: abs(math.frexp(alphas[layer] / pair.alpha)[0]) == 0.5 for layer, pair in before.items()
        }
        alphas = {layer: alphas[layer] if is_exact[layer] else pair.alpha for layer, pair in before.items()}
    # In fp32: products in half precision would be rounded on the way, too. Copies: layers may share matrices.
    pairs = {
        layer: LoraPair(
            down=pair.down.to(torch.float32, copy=True),
            up=pair.up.to(torch.float32, copy=True),
            alpha=pair.alpha,
        )
        for layer, pair in before.items()
    }
    if has_alphas:
        pairs = {layer: pair.with_alpha(alphas[layer]) for layer, pair in pairs.items()}
    tensors = spelled(pairs, names, to, dtype or contents.dtype)
    strengths = {(pair.rank, alphas[layer]) for layer, pair in before.items()}
    after = contents_of(file, tensors, _kept_metadata(contents.metadata, strengths))
    difference, layer = _greatest_difference(before, known_pairs(after, names.layers))
    return Conversion(tensors=tensors, contents=after, difference=difference, layer=layer)


def write_conversion(conversion: Conversion) -> None:
    """Write the file of a conversion, whole or not at all."""
    file = conversion.contents.file
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        save_file(conversion.tensors, temporary, metadata={"format": "pt"})
        add_metadata(temporary, conversion.contents.metadata)
        # safetensors writes files that only their owner may read.
        temporary.chmod(file.parent.stat().st_mode & 0o666)


def spelled(
    pairs: Mapping[str, LoraPair], names: FamilyNames, to: Target, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a file for a program.

    Args:
        pairs: updates by component and diffusers' name of the layer.
    """
    if to == "kohya":
        is_read = names.comfyui.is_converted_for_comfyui or any(map(names.comfyui.in_comfyui, pairs))
        if not is_read:
            raise UserError("--to kohya: no program is known that reads such files of this family")
        tensors = _kohya_tensors(pairs, names.layers, dtype)
    else:
        spelling = DIFFUSERS if to == "diffusers" else names.comfyui.for_comfyui or names.comfyui
        if to == "comfyui" and (unknown := [layer for layer in pairs if not spelling.in_comfyui(layer)]):
            raise UserError(f"--to comfyui: ComfyUI is not known to have {join_names(unknown)}")
        tensors = tensors_of(pairs, spelling, dtype)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name}: has values that are NaN, or that {dtype} cannot hold")
    return tensors


def _kohya_tensors(
    pairs: Mapping[str, LoraPair], names: Mapping[str, LayerNames], dtype: torch.dtype
) -> dict[str, Tensor]:
    parts: dict[str, tuple[Original, dict[str, LoraPair]]] = {}
    for layer, pair in pairs.items():
        component, _, name = layer.partition(".")
        other, place = names[component].in_kohya(name)
        key = f"{_KOHYA_PREFIXES[component]}_{other}".replace(".", "_")
        parts.setdefault(key, (place, {}))[1][name] = pair
    tensors = {}
    for key, (place, those) in parts.items():
        pair = join(those, place)
        tensors[f"{key}.lora_down.weight"] = pair.down.to(dtype).contiguous()
        tensors[f"{key}.lora_up.weight"] = pair.up.to(dtype).contiguous()
        tensors[f"{key}.alpha"] = torch.tensor(float(pair.alpha))
    return tensors


def _trained_alphas(pairs: Mapping[str, LoraPair], metadata: Mapping[str, str]) -> dict[str, float]:
    """The alpha of each layer; if alpha is folded in all, that of the metadata for layers of its rank."""
    alphas = {layer: pair.alpha for layer, pair in pairs.items()}
    try:
        rank, alpha = int(metadata[_DIM]), float(metadata[_NETWORK_ALPHA])
    except (KeyError, ValueError):
        return alphas
    if not 0 < alpha < math.inf or any(pair.alpha != pair.rank for pair in pairs.values()):
        return alphas
    return alphas | {layer: alpha for layer, pair in pairs.items() if pair.rank == rank}


def _kept_metadata(metadata: Mapping[str, str], strengths: Collection[tuple[int, float]]) -> dict[str, str]:
    """Metadata that stay true under other names, with rank and alpha if they are the same for all layers.

    By these :func:`_trained_alphas` finds an alpha again that is folded.
    """
    kept = {name: value for name, value in metadata.items() if name not in _STALE}
    if len(strengths) == 1:
        ((rank, alpha),) = strengths
        kept |= {_DIM: str(rank), _NETWORK_ALPHA: f"{alpha:g}"}
    return kept


def _greatest_difference(before: Mapping[str, LoraPair], after: Mapping[str, LoraPair]) -> tuple[float, str]:
    """The largest relative change of a layer's update, and the layer that has it."""
    if differing := before.keys() ^ after.keys():
        raise RuntimeError(f"{len(differing)} layers were lost or added (first: {min(differing)})")
    return max((_relative_difference(pair, after[layer]), layer) for layer, pair in before.items())


def _relative_difference(one: LoraPair, other: LoraPair) -> float:
    distance, norm = one.distance(other), one.norm
    return distance / norm if norm else float(bool(distance))
