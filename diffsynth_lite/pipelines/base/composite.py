"""This file holds several components of a pipeline in one model, where a run trains more than one of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from diffusers.loaders import PeftAdapterMixin
from torch import nn

from diffsynth_lite.lora.updates import LoraFile

_Result = TypeVar("_Result")


class Composite(nn.Module, PeftAdapterMixin):  # type: ignore[misc]  # diffusers' mixin has no types
    """Components as one module: one adapter, one optimizer and one DDP wrapper hold them all.

    Names of the adapter's tensors start with the component's.
    """

    def __init__(self, components: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, component in components.items():
            self.add_module(name, component)

    def forward(self, run: Callable[["Composite"], _Result]) -> _Result:
        """Call ``run`` with the components: a wrapper for distributed training must see one forward."""
        return run(self)


def split_adapter(
    tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any], components: Sequence[str]
) -> dict[str, LoraFile]:
    """Tensors and settings of each component, by the names of the layers in it.

    Args:
        tensors: the adapter's, by the names in the model that is made of ``components``.
        settings: peft's, with full names in ``target_modules``.
        components: names; a single one's layers have no prefix.
    """
    if len(components) == 1:
        return {components[0]: (dict(tensors), dict(settings))}
    return {
        component: (
            {_inner(name, component): value for name, value in tensors.items() if _is_of(name, component)},
            {
                **settings,
                "target_modules": [
                    _inner(name, component) for name in settings["target_modules"] if _is_of(name, component)
                ],
                **_own_patterns(settings, component),
            },
        )
        for component in components
    }


def join_adapter(files: Mapping[str, LoraFile]) -> LoraFile:
    """The opposite of :func:`split_adapter`."""
    if len(files) == 1:
        return next(iter(files.values()))
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, Any] = {}
    layers: list[str] = []
    for component, (part, part_settings) in files.items():
        tensors |= {f"{component}.{name}": value for name, value in part.items()}
        layers += [f"{component}.{name}" for name in part_settings.get("target_modules", ())]
        settings |= part_settings
    return tensors, settings | {"target_modules": sorted(layers)}


def _own_patterns(settings: Mapping[str, Any], component: str) -> dict[str, dict[str, float]]:
    """Ranks and alphas of layers of a component, by their names in it."""
    patterns: dict[str, dict[str, float]] = {
        kind: settings[kind] for kind in ("rank_pattern", "alpha_pattern") if kind in settings
    }
    return {
        kind: {_inner(name, component): value for name, value in own.items() if _is_of(name, component)}
        for kind, own in patterns.items()
    }


def _is_of(name: str, component: str) -> bool:
    return name.startswith(f"{component}.")


def _inner(name: str, component: str) -> str:
    return name.removeprefix(f"{component}.")
