"""This file puts an adapter on a model through peft, reads and loads its tensors and measures its updates."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from diffusers.training_utils import cast_training_params
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from diffsynth_lite.core.weights.frozen_linear import weight_norm
from diffsynth_lite.errors import UserError
from diffsynth_lite.lora.kinds import LORA, AdapterKind, TrainedTensor
from diffsynth_lite.lora.layers import LokrLinear, dora_update_norm, scales_for_comfyui

OWN_ADAPTER = "default"
"""peft's name of the adapter that a run trains."""

_ALWAYS_SAVED = ("r", "lora_alpha", "alpha")
_OF_TRAINING = ("init_weights", "lora_dropout")
"""Left out of files: diffusers would put the dropout on a model and leave it active when it generates."""
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
        dropout: probability in [0, 1) that an input of the adapter is dropped in training.
        seed: of the first values; the global random state is not changed.
        device: to read frozen weights on, for kinds that start from them; None reads each where it is.
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


def is_adapter_active(model: nn.Module) -> bool:
    """Whether what :func:`add_adapter` put on a model takes part in what it computes."""
    layers = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
    return any(OWN_ADAPTER in layer.active_adapters for layer in layers)


@contextmanager
def leaving_out(model: nn.Module, adapter: str) -> Iterator[None]:
    """Scope in which an adapter of a model is inactive.

    Only which adapters are active changes: peft's own way to disable them also sets which parameters train,
    which a graph may hold, and its way back would have all of them train.

    Args:
        adapter: peft's name; the model may have no adapter of that name.
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


@contextmanager
def at_strength(model: nn.Module, strength: float, adapter: str = OWN_ADAPTER) -> Iterator[None]:
    """Scope in which the update of an adapter is multiplied by a number, which may be negative.

    A backward pass must end before the scope does: what is checkpointed is computed again there.

    Args:
        model: as for :func:`without_adapter`.
        adapter: peft's name.
    """
    layers = _layers_with(model, adapter)
    scalings = [layer.scaling[adapter] for layer in layers]
    try:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[adapter] = strength * scaling
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling[adapter] = scaling


def scalings_reader(model: nn.Module) -> Callable[[], list[float]]:
    """A function that returns the distinct scalings of the trained adapter then, 0 where it is inactive."""
    layers = _layers_with(model, OWN_ADAPTER)
    return lambda: sorted({one.scaling[OWN_ADAPTER] * (OWN_ADAPTER in one.active_adapters) for one in layers})


def _layers_with(model: nn.Module, adapter: str) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, BaseTunerLayer) and adapter in part.scaling]


def peft_pattern(values: Mapping[str, Number]) -> dict[str, Number]:
    """Values of some layers as peft expects them: by pattern, one pattern for each value.

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
    """Number of parameters of an adapter on these linear layers; see :func:`adapter_shapes`."""
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
    """Shapes of the tensors of an adapter on these linear layers, and the number of tensors of each shape.

    Args:
        model: may be on the meta device.
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
    """Tensors of the model's adapter, by peft's names, and those that a file adds for ComfyUI."""
    return {**tensors, **scales_for_comfyui(model, tensors, OWN_ADAPTER, device)}


def by_peft_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by the names of :func:`adapter_tensors`, from those by parameter name of the moving average."""
    named = {}
    for name, tensor in tensors.items():
        layer, _, rest = name.partition(f".{OWN_ADAPTER}")
        # A tensor that is not a LoRA's matrix has only the name of its module.
        named[f"{layer}{rest}" if ".lora_A" in layer or ".lora_B" in layer else layer] = tensor
    return named


def load_adapter_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load values of :func:`adapter_tensors` into the adapter of a model."""
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
    # Of 20 layers and more, peft keeps only endings, which do not name the component.
    kept["target_modules"] = set(_adapted_layers(model))
    kept |= _patterns(model, kept)
    return {name: sorted(value) if isinstance(value, set) else value for name, value in kept.items()}


def _patterns(model: nn.Module, settings: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Ranks and alphas of layers that have others than the adapter's settings; empty where none has."""
    layers = _adapted_layers(model)
    own: dict[str, dict[str, float]] = {
        "rank_pattern": {name: layer.r[OWN_ADAPTER] for name, layer in layers.items()},
        "alpha_pattern": {
            name: (layer.lora_alpha if hasattr(layer, "lora_alpha") else layer.alpha)[OWN_ADAPTER]
            for name, layer in layers.items()
        },
    }
    alpha = settings.get("lora_alpha", settings.get("alpha"))
    usual = {"rank_pattern": settings["r"], "alpha_pattern": alpha}
    differing = {
        kind: {name: value for name, value in values.items() if value != usual[kind]}
        for kind, values in own.items()
    }
    return {kind: values for kind, values in differing.items() if values}


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers with the adapter, by full name."""
    layers = {name: part for name, part in model.named_modules() if isinstance(part, BaseTunerLayer)}
    return {name: layer for name, layer in layers.items() if OWN_ADAPTER in layer.r}


_BFLOAT16_ROUNDING = 2.0**-9
"""Largest relative change of a number that is rounded to bfloat16."""


@dataclass(frozen=True)
class UpdateSize:
    """Size of the update of a layer.

    Attributes:
        ratio: Frobenius norm of the update, such as ``scaling * B @ A``, over that of the frozen weight W.
    """

    ratio: float
    num_inputs: int

    @property
    def is_lost_in_rounding(self) -> bool:
        """Whether it changes the layer's output by less than rounding to bfloat16 does.

        An input x changes it by at most the norm of the update times that of x, where W itself gives, in the
        mean over all directions of x, the norm of W times that of x over the root of the number of inputs.
        """
        return self.ratio * math.sqrt(self.num_inputs) < _BFLOAT16_ROUNDING


class UpdateSizes:
    """Measures the update of each layer with a trained LoRA.

    Args:
        model: with its adapter; its frozen weights do not change, and are read once.
        device: to compute on, unless it has no fp64; only some rows of a weight at a time are copied to it.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, torch.device("cpu") if device.type == "mps" else device
        self._weight_norms: list[float] | None = None

    def measure(self) -> dict[str, UpdateSize]:
        """The present update of each layer, by the layer's full name."""
        layers = _adapted_layers(self._model)
        bases = [layer.get_base_layer() for layer in layers.values()]
        if self._weight_norms is None:
            self._weight_norms = _on_host([weight_norm(base, self._device) for base in bases])
        updates = _on_host([_update_norm(layer, self._device) for layer in layers.values()])
        return {
            name: UpdateSize(_ratio(update, norm), base.in_features)
            for name, base, update, norm in zip(layers, bases, updates, self._weight_norms, strict=True)
        }


def _ratio(update: float, norm: float) -> float:
    if norm:
        return update / norm
    return math.inf if update else 0.0


@torch.no_grad()
def _update_norm(layer: Any, device: torch.device) -> Tensor:
    """Frobenius norm of what an adapter adds to a layer's weight, a scalar in fp64.

    That of a LoRA, ``scaling * B @ A``, by products of the size of the rank only: its square is the trace of
    ``(B A)' B A``, which is the sum of ``(B' B) * (A A')``.
    """
    if isinstance(layer, LokrLinear):
        return layer.update_norm(OWN_ADAPTER, device)
    if OWN_ADAPTER in layer.lora_variant:
        return dora_update_norm(layer, OWN_ADAPTER, device)
    down, up = (half[OWN_ADAPTER].weight.to(device).double() for half in (layer.lora_A, layer.lora_B))
    square = ((up.T @ up) * (down @ down.T)).sum()
    # Rounding can make the result of a zero update negative.
    norm: Tensor = abs(layer.scaling[OWN_ADAPTER]) * square.clamp(min=0).sqrt()
    return norm


def _on_host(scalars: list[Tensor]) -> list[float]:
    """The scalars in one transfer, as each transfer waits for the device."""
    return torch.stack(scalars).tolist() if scalars else []
