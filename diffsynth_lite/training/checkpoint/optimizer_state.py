"""Optimizer state as tensors under parameter names and a json document: no pickle, no positions.

torch's own ``state_dict`` numbers the parameters: after a change in which layers are trained, moments would
silently land on other weights. Settings (learning rate, betas, weight decay) are not part of the state: they
come from the configuration with which the optimizer was built.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from diffsynth_lite.training.checkpoint.manifest import CheckpointError

_SEPARATOR = "::"
"""Between parameter and state in a tensor's name; a Python identifier, so a parameter's name, has none."""


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of an optimizer by parameter name.

    Args:
        optimizer: keeps only tensors as state, as all of torch.optim but LBFGS do.
        named_parameters: at least every parameter of the optimizer.

    Returns:
        ``"<parameter>::<state>"`` to tensor (the live ones, not copies), and the document that
        ``load_optimizer`` checks them against.

    Raises:
        ValueError: a parameter has no name, or its state holds something other than tensors.
    """
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, dict[str, list[Any]]] = {}
    for name, parameter in _named_in_order(optimizer, named_parameters).items():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {key} of {name} as a {type(value).__name__}"
                )
            tensors[f"{name}{_SEPARATOR}{key}"] = value
        parameters[name] = {"shape": list(parameter.shape), "state": sorted(state)}
    return tensors, {"optimizer": type(optimizer).__name__, "parameters": parameters}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
) -> None:
    """Give an optimizer the state that ``optimizer_tensors`` took, as copies; its settings stay its own.

    Args:
        optimizer: of the same class, over the same parameters in any order and grouping.
        named_parameters: at least every parameter of the optimizer.
        tensors: from ``optimizer_tensors``, with its document.

    Raises:
        CheckpointError: class, names, shapes or tensors do not fit; the optimizer is unchanged.
        ValueError: a parameter of the optimizer has no name.
    """
    parameters = _named_in_order(optimizer, named_parameters)
    saved = document["parameters"]
    _check_class(optimizer, document["optimizer"])
    _check_same_names("trained parameter", expected=set(parameters), found=set(saved))
    for name, parameter in parameters.items():
        if list(parameter.shape) != saved[name]["shape"]:
            shapes = f"{saved[name]['shape']} in the checkpoint and {list(parameter.shape)} in the model"
            raise CheckpointError(f"optimizer state: {name} has shape {shapes}")
    stated = {f"{name}{_SEPARATOR}{key}" for name, entry in saved.items() for key in entry["state"]}
    _check_same_names("tensor", expected=stated, found=set(tensors))

    state = {
        index: {key: tensors[f"{name}{_SEPARATOR}{key}"].clone() for key in saved[name]["state"]}
        for index, name in enumerate(parameters)
        if saved[name]["state"]
    }
    # torch numbers parameters through the groups in order, as _named_in_order does.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _named_in_order(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in named_parameters.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nameless = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if nameless:
        raise ValueError(f"the optimizer holds parameters without a name, of shapes {nameless[:3]}")
    return {names[id(parameter)]: parameter for parameter in parameters}


def _check_class(optimizer: torch.optim.Optimizer, saved: str) -> None:
    if type(optimizer).__name__ != saved:
        raise CheckpointError(f"optimizer state is of {saved}, this run uses {type(optimizer).__name__}")


def _check_same_names(what: str, *, expected: set[str], found: set[str]) -> None:
    if expected != found:
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        raise CheckpointError(
            f"optimizer state: {len(missing)} {what}s missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )
