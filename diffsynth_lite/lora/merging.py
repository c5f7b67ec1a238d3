"""This file adds LoRAs up to one of all their ranks, and brings a LoRA to a lower rank."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import torch

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.layer_names import LayerNames
from diffsynth_lite.lora.reading import LoraContents, known_pairs
from diffsynth_lite.lora.updates import DoraUpdate, LayerUpdate, LokrUpdate, LoraPair

MERGED_FROM = "diffsynth_lite.merged_from"
"""Metadata of what is made of several LoRAs: their names and weights, as json."""
_TRIGGER, _ABOUT = "modelspec.trigger_phrase", "modelspec.description"
_OF_ONE_RANK = ("ss_network_dim", "ss_network_alpha")
_OF_ONE_FILE = (
    *("diffsynth_lite.contract", "diffsynth_lite.step", "diffsynth_lite.weights"),
    *("modelspec.thumbnail", "modelspec.usage_hint", "ss_output_name", "ss_steps"),
)


@dataclass(frozen=True, kw_only=True)
class WeightedLora:
    """A LoRA, and the factor of its update in a sum.

    Attributes:
        name: for people, without folders.
    """

    name: str
    contents: LoraContents
    weight: float


def in_two_matrices(contents: LoraContents) -> LoraContents:
    """The same updates, each as the product of two matrices; those of a LoKr have a larger rank.

    Raises:
        UserError: it is a DoRA, whose change of a weight depends on that weight.
    """
    updates: dict[str, LayerUpdate] = {}
    for key, update in contents.updates.items():
        if isinstance(update, DoraUpdate):
            raise UserError(
                f"{contents.file}: is a DoRA, whose update depends on the base model's weights, so it cannot "
                "be added to others, nor have its rank reduced; merge it into that model with --into-base"
            )
        updates[key] = _product_of(update) if isinstance(update, LokrUpdate) else update
    return replace(contents, updates=updates)


def _product_of(update: LokrUpdate) -> LoraPair:
    """By ``L (x) A B = (L (x) A) (I (x) B)``."""
    left, right = update.folded
    outer = reduce(torch.matmul, left)
    first, second = right if len(right) == 2 else (right[0], torch.eye(right[0].shape[1]))
    down = torch.kron(torch.eye(outer.shape[1]), second)
    return LoraPair(down=down, up=torch.kron(outer, first), alpha=float(len(down)))


def merge(sources: Sequence[WeightedLora], names: Mapping[str, LayerNames], file: Path) -> LoraContents:
    """The weighted sum of LoRAs, with the ranks of all; exact but for one rounding of ``up`` to fp32.

    Args:
        sources: each in two matrices.
        names: layers by component, of the family that all are of.
        file: that it will be written to.

    Returns:
        By component and diffusers' name of the layer, with alpha folded.
    """
    parts: dict[str, list[LoraPair]] = {}
    for source in sources:
        for layer, pair in known_pairs(source.contents, names).items():
            up = pair.up.float() * (source.weight * pair.alpha / pair.rank)
            parts.setdefault(layer, []).append(replace(pair, down=pair.down.float(), up=up))
    updates: dict[str, LayerUpdate] = {}
    for layer, pairs in parts.items():
        if len(sizes := {(pair.down.shape[1:], len(pair.up)) for pair in pairs}) > 1:
            raise UserError(
                f"--merge: {layer} has different sizes in these LoRAs, {' and '.join(map(str, sizes))}; only "
                "LoRAs of one model can be merged"
            )
        down = torch.cat([pair.down for pair in pairs])
        up = torch.cat([pair.up for pair in pairs], dim=1)
        updates[layer] = LoraPair(down=down, up=up, alpha=float(len(down)))
    return LoraContents(file=file, updates=updates, metadata=_metadata(sources), has_alpha=False)


def reduce_rank(contents: LoraContents, rank: int) -> tuple[LoraContents, dict[str, tuple[float, float]]]:
    """The nearest LoRA of a rank, by Frobenius norm (Eckart and Young 1936); lower ranks stay as they are.

    Args:
        contents: in two matrices.

    Returns:
        The LoRA, and of each layer the norms of what it lost and of its update before.
    """
    updates: dict[str, LayerUpdate] = {}
    norms = {}
    for layer, pair in contents.pairs.items():
        updates[layer], lost = _truncated(pair, rank) if pair.rank > rank else (pair, 0.0)
        norms[layer] = lost, pair.norm
    metadata = {name: value for name, value in contents.metadata.items() if name not in _OF_ONE_RANK}
    metadata[_ABOUT] = f"{metadata.get(_ABOUT, '')} Reduced to rank {rank}.".strip()
    return replace(contents, updates=updates, metadata=metadata), norms


def _truncated(pair: LoraPair, rank: int) -> tuple[LoraPair, float]:
    """The pair of a lower rank, and the norm of what it lost; without the product of the two matrices.

    With a QR decomposition of each, the singular values are those of a matrix as small as the rank.
    """
    left, inner_left = torch.linalg.qr(pair.up.double().flatten(1) * (pair.alpha / pair.rank))
    right, inner_right = torch.linalg.qr(pair.down.double().flatten(1).T)
    first, values, second = torch.linalg.svd(inner_left @ inner_right.T)
    roots = values[:rank].sqrt()
    down = roots[:, None] * (second[:rank] @ right.T)
    up = left @ first[:, :rank] * roots
    kept = LoraPair(
        down=down.float().reshape(-1, *pair.down.shape[1:]),
        up=up.float().reshape(*up.shape, *pair.up.shape[2:]),
        alpha=float(len(roots)),
    )
    return kept, float(values[rank:].norm())


def _metadata(sources: Sequence[WeightedLora]) -> dict[str, str]:
    """All of a single file; of a sum what its files agree on, their trigger words, and what they are."""
    first, *others = [source.contents.metadata for source in sources]
    if not others and sources[0].weight == 1:
        return first
    left_out = {*_OF_ONE_RANK, *_OF_ONE_FILE}
    shared = {
        name: value
        for name, value in first.items()
        if name not in left_out and all(other.get(name) == value for other in others)
    }
    words = [word for one in (first, *others) for word in one.get(_TRIGGER, "").split(", ") if word]
    title = " + ".join(f"{source.name} x {source.weight:g}" for source in sources)
    made_of = [{"lora": source.name, "weight": source.weight} for source in sources]
    own = {"modelspec.title": title, _ABOUT: f"Merged from {title}.", MERGED_FROM: json.dumps(made_of)}
    return shared | own | ({_TRIGGER: ", ".join(dict.fromkeys(words))} if words else {})
