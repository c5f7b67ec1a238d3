"""This file puts an adapter on a model through peft, and takes its tensors out and in."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from diffusers.training_utils import cast_training_params
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.kinds.dora import scales_for_comfyui
from diffsynth_lite.lora.kinds.kind import LORA, AdapterKind, TrainedTensor

OWN_ADAPTER = "default"
"""peft's name of the adapter that a run trains."""

_ALWAYS_SAVED = ("r", "lora_alpha", "alpha")
_OF_TRAINING = ("init_weights", "lora_dropout")
"""What a file must not say: diffusers puts the dropout on a model, and leaves it active where it draws."""
_PATTERNS = ("rank_pattern", "alpha_pattern")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class LoraSize:
    """Rank and alpha of a layer's adapter: its update is scaled by ``alpha / rank``."""

    rank: int
    alpha: float


def add_adapter(
    model: nn.Module,
    layers: Sequence[str],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    seed: int,
    own: Mapping[str, LoraSize] = MappingProxyType({}),
    kind: AdapterKind = LORA,
    device: torch.device | None = None,
) -> None:
    """Freeze a model and put an adapter in fp32 on the given layers, which does not change the model's
    output.

    Args:
        model: a diffusers model. peft draws the first values on the CPU, whatever device it is on.
        layers: full names of linear layers.
        rank: inner width of each pair of matrices.
        alpha: the update is scaled by ``alpha / rank``.
        dropout: probability in [0, 1) that an input of the adapter is dropped in training.
        seed: of the first values; the global random state is left as it was.
        own: of layers that have another rank and alpha.
        kind: of the adapter.
        device: where frozen weights are read, for kinds that start from them; None is where they are.
    """
    model.requires_grad_(False)
    # Full names, not endings: the layers left out in the last block then need no exclude list in the file.
    config = kind.config(
        layers,
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        rank_pattern=peft_pattern({layer: size.rank for layer, size in own.items()}),
        alpha_pattern=peft_pattern({layer: size.alpha for layer, size in own.items()}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(config, adapter_name=OWN_ADAPTER)  # type: ignore[operator]  # of every diffusers model
        cast_training_params(model, torch.float32)
        kind.start(model, layers, OWN_ADAPTER, device)
    adapted = _adapted_layers(model).keys()
    assert adapted == set(layers), f"peft adapted {len(adapted)} layers of {len(layers)}"


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Scope in which a model computes without what :func:`add_adapter` put on it; other adapters stay active.

    With no other, it computes what it did before it had one, bit for bit.

    Args:
        model: plain, or wrapped by DDP or a compiler, or a model that is made of several.
    """
    with leaving_out(model, OWN_ADAPTER):
        yield


@contextmanager
def leaving_out(model: nn.Module, adapter: str) -> Iterator[None]:
    """Scope in which an adapter of a model takes no part.

    Only which adapters are active changes: peft's own way to disable them also says which parameters train,
    which a graph may hold, and its way back would have all of them train.

    Args:
        adapter: peft's name of it; the model may have none of that name.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    active = [layer.active_adapter for layer in layers]
    try:
        for layer in layers:
            layer._active_adapter = [name for name in layer.active_adapters if name != adapter]
        yield
    finally:
        for layer, names in zip(layers, active, strict=True):
            layer._active_adapter = names


def peft_pattern(values: Mapping[str, Number]) -> dict[str, Number]:
    """Values of some layers as peft wants them: by a pattern, of which there is one for each value.

    peft tries the patterns in order, each as the end of a name unless it begins so.
    """
    layers: dict[Number, list[str]] = {}
    for layer, value in values.items():
        layers.setdefault(value, []).append(re.escape(layer))
    return {f"^(?:{'|'.join(names)})": value for value, names in layers.items()}


def adapter_size(
    model: nn.Module,
    layers: Sequence[str],
    *,
    rank: int,
    own: Mapping[str, LoraSize] = MappingProxyType({}),
    kind: AdapterKind = LORA,
) -> int:
    """Parameters that an adapter on these linear layers has; see :func:`adapter_shapes`."""
    shapes = adapter_shapes(model, layers, rank=rank, own=own, kind=kind)
    return sum(number * tensor.size for tensor, number in shapes.items())


def adapter_shapes(
    model: nn.Module,
    layers: Sequence[str],
    *,
    rank: int,
    own: Mapping[str, LoraSize] = MappingProxyType({}),
    kind: AdapterKind = LORA,
) -> Counter[TrainedTensor]:
    """Shapes of the tensors of an adapter on these linear layers, and how many there are of each.

    Args:
        model: may be on the meta device.
        layers: full names.
        own: of layers that have another rank.
    """
    shapes: Counter[TrainedTensor] = Counter()
    for layer in layers:
        num_outputs, num_inputs = model.get_parameter(f"{layer}.weight").shape
        width = own[layer].rank if layer in own else rank
        shapes.update(kind.tensors(num_outputs, num_inputs, width).values())
    return shapes


def example_tensors(
    model: nn.Module,
    layers: Sequence[str],
    *,
    rank: int,
    own: Mapping[str, LoraSize] = MappingProxyType({}),
    kind: AdapterKind = LORA,
) -> dict[str, torch.Tensor]:
    """Tensors without values as :func:`exported_tensors` has them, of an adapter on these linear layers.

    Args:
        model: may be on the meta device.
        layers: full names.
        own: of layers that have another rank.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        num_outputs, num_inputs = model.get_parameter(f"{layer}.weight").shape
        width = own[layer].rank if layer in own else rank
        tensors = kind.tensors(num_outputs, num_inputs, width)
        shapes |= {f"{layer}{ending}": tensor.shape for ending, tensor in tensors.items()}
        shapes |= {f"{layer}{ending}": (num_outputs,) for ending in kind.derived}
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def adapter_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapter's tensors by peft's names, on the CPU."""
    return {
        name: tensor.detach().cpu().contiguous() for name, tensor in get_peft_model_state_dict(model).items()
    }


def exported_tensors(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Tensors of the model's adapter, by peft's names, with what a file has beside them for ComfyUI.

    Args:
        tensors: as of :func:`adapter_tensors`, of any step.
        device: to compute on.
    """
    return {**tensors, **scales_for_comfyui(model, tensors, OWN_ADAPTER, device)}


def by_peft_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by parameter name, as the moving average has them, by those of :func:`adapter_tensors`."""
    return {_peft_name(name): tensor for name, tensor in tensors.items()}


def _peft_name(parameter: str) -> str:
    layer, _, rest = parameter.partition(f".{OWN_ADAPTER}")
    # What has a tensor of its own beside matrices is called by its module alone.
    return f"{layer}{rest}" if ".lora_A" in layer or ".lora_B" in layer else layer


def load_adapter_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give an adapter already on the model the values of :func:`adapter_tensors`.

    Raises:
        UserError: the names or shapes differ from the adapter's.
    """
    present = {name: tensor.shape for name, tensor in get_peft_model_state_dict(model).items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if present != given:
        differing = sorted(
            name for name in present.keys() | given.keys() if present.get(name) != given.get(name)
        )
        raise UserError(
            f"the adapter in the checkpoint does not fit the model: {len(differing)} tensors differ "
            f"(first: {differing[0]}); resume with the lora settings that it was trained with, or, if a "
            "set of lora.target_modules has other layers now, with the version that began the run"
        )
    set_peft_model_state_dict(model, dict(tensors))


def adapter_settings(model: nn.Module) -> dict[str, Any]:
    """peft's settings of the adapter as plain values, for the LoRA file's metadata.

    Only rank, alpha, full names of layers and what differs from peft's defaults: a file that lists every
    setting of one peft version is refused by versions that do not know them all. What layers have of their
    own (``rank_pattern``, ``alpha_pattern``) is by their full names; see :func:`peft_pattern`.
    """
    settings: dict[str, Any] = model.peft_config[OWN_ADAPTER].to_dict()  # type: ignore[index,union-attr]
    defaults = type(model.peft_config[OWN_ADAPTER])().to_dict()  # type: ignore[index,union-attr]
    kept = {
        name: value
        for name, value in settings.items()
        if name in _ALWAYS_SAVED or (name in defaults and value != defaults[name])
    }
    for name in (*_PATTERNS, *_OF_TRAINING):
        kept.pop(name, None)
    # Of 20 layers and more, peft keeps endings only, which do not say whose of several components they are.
    kept["target_modules"] = set(_adapted_layers(model))
    kept |= _patterns(model, kept)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in kept.items()}


def _patterns(model: nn.Module, settings: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Ranks and alphas of layers that have others than the adapter's settings say; nothing where none has."""
    layers = _adapted_layers(model)
    own: dict[str, dict[str, float]] = {
        "rank_pattern": {name: layer.r[OWN_ADAPTER] for name, layer in layers.items()},
        "alpha_pattern": {name: _alpha(layer) for name, layer in layers.items()},
    }
    alpha = settings.get("lora_alpha", settings.get("alpha"))
    usual = {"rank_pattern": settings["r"], "alpha_pattern": alpha}
    differing = {
        kind: {name: value for name, value in values.items() if value != usual[kind]}
        for kind, values in own.items()
    }
    return {kind: values for kind, values in differing.items() if values}


def _alpha(layer: Any) -> float:
    """Of a layer of peft, whose kinds have different names for it."""
    alpha: float = (layer.lora_alpha if hasattr(layer, "lora_alpha") else layer.alpha)[OWN_ADAPTER]
    return alpha


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers of peft that are trained, by their full names."""
    layers = {name: part for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)}
    return {name: layer for name, layer in layers.items() if OWN_ADAPTER in layer.r}
