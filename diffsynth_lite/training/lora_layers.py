"""This file decides which layers of a family's model get a LoRA by a config."""

from collections.abc import Sequence
from typing import get_args

import torch

from diffsynth_lite.config import Config
from diffsynth_lite.config.model import TargetSet
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora import find_target_layers
from diffsynth_lite.pipelines import ModelFamily


def find_targets(family: ModelFamily, transformer: torch.nn.Module, config: Config) -> list[str]:
    """Full names of the layers that get a LoRA.

    Args:
        transformer: what the family trains; may be on the meta device.

    Raises:
        UserError: the settings name none in the model, or none in one of its components.
    """
    targets = _targets(family, config)
    layers = find_target_layers(transformer, targets, unused_modules=family.unused_modules(transformer))
    for name, component in family.parts_of(transformer).items():
        prefix = "" if component is transformer else f"{name}."
        if not any(layer.startswith(prefix) for layer in layers):
            raise UserError(
                f"lora.target_modules: none of {', '.join(targets)} is in {name}, "
                f"which lora.components names; add one, or leave {name} out"
            )
    return layers


def _targets(family: ModelFamily, config: Config) -> Sequence[str]:
    chosen = config.lora.target_modules
    if chosen is None:
        return family.default_target_modules
    names = [chosen] if isinstance(chosen, str) else chosen
    unknown = [name for name in names if name in get_args(TargetSet) and name not in family.target_sets]
    if unknown:
        raise UserError(
            f"lora.target_modules: {unknown[0]} is no set of layers that {config.model.family} names; list "
            f"them instead, or leave it out for the default, [{', '.join(family.default_target_modules)}]"
        )
    return [target for name in names for target in family.target_sets.get(name, (name,))]
