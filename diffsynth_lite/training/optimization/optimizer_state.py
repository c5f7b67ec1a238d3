"""Optimizer state as tensors under parameter names and a json document: no pickle, no positions.

torch's own ``state_dict`` numbers the parameters: after a change in which layers are trained, moments would
silently land on other weights. Settings (learning rate, betas, weight decay) are not part of the state: they
come from the configuration with which the optimizer was built. Values that an optimizer counts or estimates
in a group of parameters as it runs, such as Prodigy's distance, are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from diffsynth_lite.errors import CheckpointError

_SEPARATOR = "::"
"""Between parameter and state in a tensor's name; a Python identifier, so a parameter's name, has none."""
_SETTINGS = frozenset(["params", "lr", "weight_decay"])
"""Of a group: set by the configuration."""
_STATE_OF_OPTIONS = MappingProxyType({"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"})
"""Options of torch's optimizers, and the state that each of them begins with the first step."""

_Plain: TypeAlias = bool | int | float | str | None
"""Values that json keeps exactly."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """The state that the optimizer of a run keeps.

    Attributes:
        has_average: whether it averages the weights, and the average is exported.
    """

    state_bytes: int
    has_average: bool


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of an optimizer by parameter name.

    Args:
        optimizer: keeps tensors, numbers and text as state, as all of torch.optim but LBFGS do.
        named_parameters: at least every parameter of the optimizer.

    Returns:
        ``"<parameter>::<state>"``, or ``"groups.<place>::<state>"``, to tensor (the live ones, not copies),
        and the document that ``load_optimizer`` checks them against.

    Raises:
        ValueError: a parameter has no name, or the state holds something else.
    """
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, dict[str, Any]] = {}
    for name, parameter in _named_in_order(optimizer, named_parameters).items():
        own, plain = _split(optimizer.state.get(parameter, {}), name, optimizer)
        tensors |= own
        parameters[name] = {"shape": list(parameter.shape), "state": _keys(own)}
        parameters[name] |= {"plain": plain} if plain else {}
    document = {"optimizer": type(optimizer).__name__, "parameters": parameters}
    groups = []
    for place, group in enumerate(optimizer.param_groups):
        own, plain = _split(_changed_in(group, optimizer), _group_name(place), optimizer)
        tensors |= own
        groups.append({"state": _keys(own), "plain": plain})
    return tensors, document | ({"groups": groups} if any(map(any, map(dict.values, groups))) else {})


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    document: Mapping[str, Any],
) -> None:
    """Give an optimizer the state that ``optimizer_tensors`` took, as copies; its settings stay its own.

    Args:
        optimizer: of the same class, over the same parameters in any order and grouping; in the same groups
            where it keeps state for them.

    Raises:
        CheckpointError: class, names, shapes or tensors do not fit; the optimizer is unchanged.
    """
    parameters = _named_in_order(optimizer, named_parameters)
    saved, groups = document["parameters"], document.get("groups", [])
    if type(optimizer).__name__ != document["optimizer"]:
        raise CheckpointError(
            f"optimizer state is of {document['optimizer']}, this run uses {type(optimizer).__name__}"
        )
    _check_same_names("trained parameter", expected=set(parameters), found=set(saved))
    for name, parameter in parameters.items():
        if list(parameter.shape) != saved[name]["shape"]:
            shapes = f"{saved[name]['shape']} in the checkpoint and {list(parameter.shape)} in the model"
            raise CheckpointError(f"optimizer state: {name} has shape {shapes}")
    if groups and len(groups) != len(optimizer.param_groups):
        numbers = f"{len(groups)} groups of parameters in the checkpoint and {len(optimizer.param_groups)}"
        raise CheckpointError(f"optimizer state: {numbers} in this run")
    entries = saved | {_group_name(place): entry for place, entry in enumerate(groups)}
    stated = {f"{name}{_SEPARATOR}{key}" for name, entry in entries.items() for key in entry["state"]}
    _check_same_names("tensor", expected=stated, found=set(tensors))

    def stored(name: str) -> dict[str, Any]:
        copies = {key: tensors[f"{name}{_SEPARATOR}{key}"].clone() for key in entries[name]["state"]}
        return {**copies, **entries[name].get("plain", {})}

    # torch numbers parameters through the groups in order, as _named_in_order does.
    state = {index: values for index, name in enumerate(parameters) if (values := stored(name))}
    _check_options(optimizer, state.values())
    param_groups = optimizer.state_dict()["param_groups"]
    for place in range(len(groups)):
        param_groups[place] |= stored(_group_name(place))
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def _check_options(optimizer: torch.optim.Optimizer, states: Iterable[Mapping[str, Any]]) -> None:
    """Refuse options that need state from the first step on: without it torch fails at the next step."""
    for option, key in _STATE_OF_OPTIONS.items():
        is_on = any(group.get(option) for group in optimizer.param_groups)
        if is_on and any(key not in state for state in states):
            raise CheckpointError(
                f"optimizer state: the checkpoint has no {key}, which {option} of {type(optimizer).__name__} "
                "needs from the first step on; set it as the run was begun"
            )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the tensors of an optimizer's state, without counters."""
    values: Iterable[Any] = (value for entry in optimizer.state.values() for value in entry.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.ndim)


def _split(
    state: Mapping[str, Any], name: str, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Tensor], dict[str, _Plain]]:
    """The tensors of a state by their full names, and its numbers and text."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, _Plain] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            tensors[f"{name}{_SEPARATOR}{key}"] = value
        elif isinstance(value, _Plain):
            plain[key] = value
        else:
            raise ValueError(f"{type(optimizer).__name__} keeps {key} of {name} as a {type(value).__name__}")
    return tensors, plain


def _changed_in(group: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The values that have changed since the optimizer was made: the rest comes from the configuration."""
    defaults = optimizer.defaults
    return {
        key: value
        for key, value in group.items()
        if key not in _SETTINGS
        and (key not in defaults or isinstance(value, Tensor) or value != defaults[key])
    }


def _keys(tensors: Iterable[str]) -> list[str]:
    return sorted(name.rpartition(_SEPARATOR)[2] for name in tensors)


def _group_name(place: int) -> str:
    return f"groups.{place}"


def _named_in_order(
    optimizer: torch.optim.Optimizer, named_parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in named_parameters.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    nameless = [tuple(parameter.shape) for parameter in parameters if id(parameter) not in names]
    if nameless:
        raise ValueError(f"the optimizer holds parameters without a name, of shapes {nameless[:3]}")
    return {names[id(parameter)]: parameter for parameter in parameters}


def _check_same_names(what: str, *, expected: set[str], found: set[str]) -> None:
    if expected != found:
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        raise CheckpointError(
            f"optimizer state: {len(missing)} {what}s missing {missing[:3]}, "
            f"{len(unexpected)} unexpected {unexpected[:3]}"
        )
