"""This file puts finished LoRAs on a model to draw with, several at once, each with a weight."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from diffusers.training_utils import cast_training_params
from peft import LoraConfig, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.adapter import peft_pattern
from diffsynth_lite.lora.linear import use_lora_linear

_FIRST, _SECOND = ".lora_A.weight", ".lora_B.weight"


def require_fit(model: nn.Module, tensors: Mapping[str, torch.Tensor], *, place: str) -> None:
    """Check that a LoRA is one on layers of a model, with finite numbers.

    Args:
        model: may be on the meta device.
        tensors: by peft's names.
        place: where the LoRA is, for messages.

    Raises:
        UserError: naming what does not fit.
    """
    others = sorted(name for name in tensors if not name.endswith((_FIRST, _SECOND)))
    if others or not tensors:
        found = f"{others[0]}, which is no part of a plain LoRA (lora_A, lora_B)" if others else "no tensors"
        raise UserError(f"{place} holds {found}")
    layers = {name.removesuffix(_FIRST).removesuffix(_SECOND) for name in tensors}
    misfits = sorted(layer for layer in layers if not _fits(model, layer, tensors))
    if misfits:
        raise UserError(
            f"{place}: the LoRA does not fit the model: {len(misfits)} of its {len(layers)} layers are not "
            f"there or of other sizes, such as {misfits[0]}; name the base model that it was trained on, and "
            "in lora.components the components that it is on"
        )
    if broken := sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all()):
        raise UserError(f"{place}: {broken[0]} holds numbers that are not finite; get the LoRA again")


def _fits(model: nn.Module, layer: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    first, second = tensors.get(f"{layer}{_FIRST}"), tensors.get(f"{layer}{_SECOND}")
    try:
        weight = model.get_submodule(layer).weight
    except AttributeError:
        return False
    if first is None or second is None or not isinstance(weight, torch.Tensor):
        return False
    rank = len(first)
    return first.shape == (rank, *weight.shape[1:]) and second.shape[:2] == (len(weight), rank)


def add_finished_lora(
    model: nn.Module, name: str, tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> None:
    """Put a LoRA in fp32 on a model, beside those that are there; see :func:`set_lora_weights`.

    Args:
        model: a diffusers model, with weights.
        name: peft's, for the adapter.
        tensors: by peft's names, which fit the model.
        settings: peft's. Where they give no alpha, each layer's is its rank.
    """
    firsts = {key: tensor for key, tensor in tensors.items() if key.endswith(_FIRST)}
    ranks = {key.removesuffix(_FIRST): len(tensor) for key, tensor in firsts.items()}
    rank = next(iter(ranks.values()))
    alpha = settings.get("lora_alpha")
    others = peft_pattern({layer: own for layer, own in ranks.items() if own != rank})
    config = LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        rank_pattern=others,
        alpha_pattern=others if alpha is None else {},
        target_modules=list(ranks),
    )
    use_lora_linear(config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Several adapters on one model are what is wanted.
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
        model.add_adapter(config, adapter_name=name)  # type: ignore[operator]  # of every diffusers model
    cast_training_params(model, torch.float32)
    set_peft_model_state_dict(model, dict(tensors), adapter_name=name)


def set_lora_weights(model: nn.Module, weights: Mapping[str, float]) -> None:
    """Have the LoRAs named take part, each with its update multiplied by a weight, and no others.

    As ``set_adapters`` of diffusers' models, which does not know a model that is made of several.
    """
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.set_adapter(list(weights))
            for name, weight in weights.items():
                module.set_scale(name, weight)
