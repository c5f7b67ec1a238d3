"""This file identifies the release in the model's folder, and sizes it and its LoRA without weights."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from diffsynth_lite.config import Config
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.doctor.findings import counted
from diffsynth_lite.lora import adapter_shapes, adapter_size
from diffsynth_lite.lora.kinds import LORA
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.pipelines.base.release_folder import find_releases
from diffsynth_lite.training.frozen_weights import text_encoder_memory, transformer_quantization
from diffsynth_lite.training.layer_groups import (
    LayerGroup,
    adapter_kind,
    find_targets,
    layer_groups,
    rank_overrides,
)
from diffsynth_lite.training.optimization.optimizers import examine_optimizer, shown_name

_MAX_NAMED = 8
_MAX_LETTERS = 60


def model_table(config: Config, family: ModelFamily) -> dict[str, str]:
    """Facts by name, in words: the release, what its files have otherwise, each component, the LoRA."""
    transformer = family.empty_transformer()
    layers = find_targets(family, transformer, config)
    groups = layer_groups(config, family, layers)
    return (
        _release(config, family)
        | dict(_components(config, family, transformer))
        | {"LoRA": _lora(config, transformer, layers, groups)}
        | {f"LoRA of {group.name}": _in_words(group) for group in groups if group.name is not None}
    )


def _release(config: Config, family: ModelFamily) -> dict[str, str]:
    if not family.releases:
        return {"release": "none of this family is known"}
    found = find_releases(family.releases, config.model.path, family.folder)
    if not found:
        return {"release": "none that is known"}
    releases = [release for release, _ in found]
    # Of several that are alike the first one speaks for all.
    first, differing = found[0]
    names = " or ".join(release.name for release in releases)
    is_named = first.hub_id.lower() == config.model.path.lower() and not family.folder.files
    facts = {
        # A model made from a release has its settings, too.
        "release": names if is_named else f"with the settings of {names}",
        "licence of it": " or ".join(dict.fromkeys(release.licence for release in releases)),
        "not as released": _differences(differing),
        "not confirmed of it": "; ".join(first.unconfirmed),
    }
    return {name: text for name, text in facts.items() if text}


def _differences(differing: Mapping[str, tuple[Any, Any]]) -> str:
    named = [
        f"{name} is {shorten(str(found), _MAX_LETTERS)}, not {shorten(str(expected), _MAX_LETTERS)}"
        for name, (found, expected) in list(differing.items())[:_MAX_NAMED]
    ]
    more = len(differing) - len(named)
    return "; ".join([*named, *([f"and {more} more"] if more else [])])


def _components(config: Config, family: ModelFamily, transformer: nn.Module) -> Iterator[tuple[str, str]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    formats = {
        name: (str(config.model.text_encoder_quantize), quantization)
        for name, quantization in text_encoder_memory(config, family, device).quantizations.items()
    }
    if quantization := transformer_quantization(family, transformer, config, device):
        formats |= {name: (config.model.quantize, quantization) for name in family.denoisers}
    for name in family.components:
        component = family.empty_component(name)
        if component is None:
            continue
        dtype = _dtype_of(config, family, name)
        number = sum(parameter.numel() for parameter in component.parameters())
        num_bytes = number * getattr(torch, dtype).itemsize
        if name in formats:
            kept_in, quantization = formats[name]
            for parameter in component.requires_grad_(False).parameters():
                parameter.data = parameter.data.to(getattr(torch, dtype))
            quantization.apply_to(component)
            num_bytes = sum(parameter.nbytes for parameter in component.parameters())
            dtype = f"{kept_in} and {dtype}"
        trained = ", trained" if name in family.trained else ""
        origin = _origin_of(family, name)
        yield name, f"{number:,} parameters, {format_bytes(num_bytes)} in {dtype}{trained}{origin}"


def _origin_of(family: ModelFamily, name: str) -> str:
    """Where a component's weights are from, if not from the folder or repository of the pipeline."""
    if (file := family.folder.files.get(name)) is not None:
        return f", from {file.path}"
    hub = family.folder.place(name).hub
    if hub is None or hub == family.folder.hub:
        return ""
    return f", from {hub.repository} at {hub.path.name[:12]}"


def _dtype_of(config: Config, family: ModelFamily, name: str) -> str:
    model = config.model
    if name not in family.trained and name.startswith("text_"):  # also what reads on from an encoder
        return model.text_encoder_dtype
    return model.dtype if name in family.trainable else model.vae_dtype


def _in_words(group: LayerGroup) -> str:
    return (
        f"{counted(len(group.layers), 'layer')}, rank {group.size.rank}, alpha {group.size.alpha:g}, "
        f"learning rate {group.learning_rate:g}, weight decay {group.weight_decay:g}"
    )


def _lora(config: Config, transformer: nn.Module, layers: Sequence[str], groups: Sequence[LayerGroup]) -> str:
    rank, own, kind = config.lora.rank, rank_overrides(groups), adapter_kind(config)
    number = adapter_size(transformer, layers, rank=rank, own=own, kind=kind)
    weights = number * torch.float32.itemsize
    shapes = adapter_shapes(transformer, layers, rank=rank, own=own, kind=kind)
    state = examine_optimizer(config, groups, shapes, torch.device("cpu")).state_bytes
    called = "" if kind.name == LORA.name else f"{kind.title} on "
    return (
        f"{called}{counted(len(layers), 'layer')}, {number:,} parameters: {format_bytes(weights)} in "
        f"float32, and {format_bytes(state)} of {shown_name(config)}"
    )
