"""This file decides which layers of a family's model get a LoRA by a config, and which are trained alike."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.config.model import TargetSet
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import LoraSize, find_target_layers, layers_with
from diffsynth_lite.lora.kinds import AdapterKind, Dora, Lokr, Lora
from diffsynth_lite.pipelines import ModelFamily

OF_GROUP = " of "
"""Between a setting of ``train`` and the ``match`` of the entry of ``lora.groups`` that overrides it; a run
that resumes may change both alike."""
_RATES = ("learning_rate", "weight_decay")
_NUM_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that are trained alike.

    Attributes:
        name: ``match`` of the entry of ``lora.groups``; None for the layers that no entry matches.
        learning_rate: of the first matrix of each pair, at its highest.
        weight_decay: a share of the learning rate.
    """

    name: str | None
    layers: tuple[str, ...]
    size: LoraSize
    learning_rate: float
    weight_decay: float


def adapter_kind(config: Config) -> AdapterKind:
    """The adapter that trains next to each layer."""
    lora = config.lora
    if lora.kind == Lokr.name:
        return Lokr(lora.lokr_factor)
    kinds = {kind.name: kind for kind in (Lora, Dora)}
    return kinds[lora.kind](is_orthogonal=lora.init == "orthogonal")


def require_kind(config: Config) -> None:
    """Check that a run with other settings can have the adapter of its kind."""
    if config.lora.kind == Lokr.name and config.model.training_adapter is not None:
        raise UserError(
            "model.training_adapter: peft puts no LoRA on layers with a LoKr; set lora.kind to lora or dora, "
            "or keep the distillation by objective.guidance_target"
        )
    if config.lora.kind == Dora.name and config.memory.shard_base != "no":
        raise UserError(
            f"memory.shard_base: {config.memory.shard_base} does not go with lora.kind dora, as one "
            "process writes its file and needs the weights of all layers for that; set it to no, or "
            "lora.kind to lora"
        )


def default_size(config: Config) -> LoraSize:
    """Rank and alpha of layers without a group; alpha is the rank unless given."""
    return _size(config, config.lora.rank, config.lora.alpha)


def _size(config: Config, rank: int, alpha: float | None) -> LoraSize:
    """An rsLoRA is a LoRA with an alpha that grows with the root of its rank, which all programs read."""
    given = float(rank) if alpha is None else alpha
    return LoraSize(rank, given * math.sqrt(rank) if config.lora.use_rslora else given)


def layer_groups(config: Config, family: ModelFamily, layers: Sequence[str]) -> list[LayerGroup]:
    """The layers with a LoRA in groups: first the layers that no entry of ``lora.groups`` matches.

    Args:
        layers: full names, as :func:`find_targets` gives them.
    """
    names, left, groups = _with_component(family, layers), dict.fromkeys(layers), list[LayerGroup]()
    for place, entry in enumerate(config.lora.groups):
        matched = [names[name] for name in layers_with(list(names), entry.match)]
        if not matched:
            raise UserError(
                f"lora.groups[{place}].match: {entry.match} is in the name of no layer that gets a LoRA; "
                f"they are {_some(names)}"
            )
        own = [layer for layer in matched if layer in left]
        if not own:
            raise UserError(
                f"lora.groups[{place}].match: entries before it have all layers that {entry.match} matches, "
                "and the first one that matches a layer has it; put this entry before them"
            )
        for layer in own:
            del left[layer]
        rank = config.lora.rank if entry.rank is None else entry.rank
        alpha = config.lora.alpha if entry.alpha is None else entry.alpha
        groups.append(
            LayerGroup(
                name=entry.match,
                layers=tuple(own),
                size=_size(config, rank, alpha),
                learning_rate=_first(entry.learning_rate, config.train.learning_rate),
                weight_decay=_first(entry.weight_decay, config.train.weight_decay),
            )
        )
    return [default_group(config, left), *groups] if left else groups


def rates_without_effect(config: Config, groups: Iterable[LayerGroup]) -> str | None:
    """A warning of settings of ``train`` that no layer uses, as all have their own; None without any."""
    if any(group.name is None for group in groups):
        return None
    unused = [
        f"train.{name}"
        for name in _RATES
        if not config.train.is_default(name)
        and all(getattr(entry, name) is not None for entry in config.lora.groups)
    ]
    if not unused:
        return None
    return (
        f"{' and '.join(unused)} has no effect: lora.groups has all layers, with their own; leave it out, or "
        "leave layers to it"
    )


def default_group(config: Config, layers: Iterable[str] = ()) -> LayerGroup:
    """Layers that no entry of ``lora.groups`` has."""
    return LayerGroup(
        name=None,
        layers=tuple(layers),
        size=default_size(config),
        learning_rate=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
    )


def rank_overrides(groups: Iterable[LayerGroup]) -> dict[str, LoraSize]:
    """Rank and alpha of the layers that an entry of ``lora.groups`` has."""
    return {layer: group.size for group in groups if group.name is not None for layer in group.layers}


@dataclass(frozen=True, kw_only=True)
class RateGroup:
    """Matrices that are trained with one learning rate, a group of the optimizer.

    Attributes:
        matrices: those of a layer that are in the group, by the ends of their names.
    """

    label: str
    layers: tuple[str, ...]
    matrices: tuple[str, ...]
    learning_rate: float
    weight_decay: float


def rate_groups(config: Config, groups: Sequence[LayerGroup]) -> list[RateGroup]:
    """The groups of the optimizer: those of layers, and with LoRA+ each in two, first and second matrices.

    Parameters that must not be pulled to zero are in a group of their own, without weight decay.
    """
    ratio, kind = config.lora.loraplus_ratio, adapter_kind(config)
    halves = [(kind.matrices, 1.0)]
    if ratio != 1:
        halves = [((matrix,), times) for matrix, times in zip(kind.matrices, (1.0, ratio), strict=True)]
    if kind.undecayed:
        halves.append((kind.undecayed, 1.0))
    return [
        RateGroup(
            label=(group.name or "others") + (matrices[0] if matrices != kind.matrices else ""),
            layers=group.layers,
            matrices=matrices,
            learning_rate=group.learning_rate * times,
            weight_decay=0.0 if matrices == kind.undecayed else group.weight_decay,
        )
        for group in groups
        for matrices, times in halves
    ]


def group_fingerprint(config: Config) -> dict[str, Any]:
    """The settings of groups that decide a run's numbers, by dotted key; rates have keys of their own."""
    groups = config.lora.groups
    fingerprint: dict[str, Any] = {"lora.groups": [group.model_dump(exclude=set(_RATES)) for group in groups]}
    for name in _RATES:
        fingerprint |= {f"train.{name}{OF_GROUP}{group.match}": getattr(group, name) for group in groups}
    return fingerprint


def find_targets(family: ModelFamily, transformer: torch.nn.Module, config: Config) -> list[str]:
    """Full names of the layers that get a LoRA.

    Args:
        transformer: may be on the meta device.
    """
    targets = _targets(family, config)
    layers = find_target_layers(transformer, targets, unused_modules=family.unused_modules(transformer))
    _require_each_component(family, transformer, layers, f"target_modules: none of {', '.join(targets)}")
    blocks = config.lora.target_blocks
    if blocks is not None:
        layers = _in_blocks(blocks, _with_component(family, layers))
        _require_each_component(family, transformer, layers, f"target_blocks: none of {', '.join(blocks)}")
    return layers


def _require_each_component(
    family: ModelFamily, transformer: torch.nn.Module, layers: Sequence[str], chosen: str
) -> None:
    for name, component in family.parts_of(transformer).items():
        prefix = "" if component is transformer else f"{name}."
        if not any(layer.startswith(prefix) for layer in layers):
            raise UserError(
                f"lora.{chosen} is in {name}, which lora.components names; add one, or leave {name} out"
            )


def _targets(family: ModelFamily, config: Config) -> Sequence[str]:
    chosen = config.lora.target_modules
    if chosen is None:
        return family.default_target_modules
    names = [chosen] if isinstance(chosen, str) else chosen
    unknown = [name for name in names if name in get_args(TargetSet) and name not in family.target_sets]
    if unknown:
        raise UserError(
            f"lora.target_modules: {unknown[0]} is not a set of layers of {config.model.family}; list "
            f"them instead, or leave it out for the default, [{', '.join(family.default_target_modules)}]"
        )
    return [target for name in names for target in family.target_sets.get(name, (name,))]


def _in_blocks(blocks: Sequence[str], names: dict[str, str]) -> list[str]:
    """The layers of some blocks.

    Args:
        names: the layers by their names with their components.
    """
    matched = {block: layers_with(list(names), block) for block in blocks}
    if unmatched := [block for block, found in matched.items() if not found]:
        raise UserError(
            f"lora.target_blocks: {unmatched[0]} is in the name of no layer of lora.target_modules; they are "
            f"{_some(names)}"
        )
    wanted = {name for found in matched.values() for name in found}
    return [layer for name, layer in names.items() if name in wanted]


def _with_component(family: ModelFamily, layers: Sequence[str]) -> dict[str, str]:
    """Layers by their names with their component, which full names lack where there is only one."""
    prefix = f"{family.trained[0]}." if len(family.trained) == 1 else ""
    return {f"{prefix}{layer}": layer for layer in layers}


def _first(own: float | None, usual: float) -> float:
    return usual if own is None else own


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NUM_NAMED} more" if len(listed) > _NUM_NAMED else ""
    return f"{', '.join(listed[:_NUM_NAMED])}{more}"
