"""This file measures how large the update of a LoRA is, layer by layer, beside the weight that it changes."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from diffsynth_lite.core.weights import weight_norm
from diffsynth_lite.lora.adapter import OWN_ADAPTER
from diffsynth_lite.lora.kinds.dora import dora_update_norm
from diffsynth_lite.lora.kinds.lokr import LokrLinear

_BFLOAT16_ROUNDING = 2.0**-9
"""Most that a number changes, as a part of it, when it is rounded to bfloat16."""


@dataclass(frozen=True)
class UpdateSize:
    """How large the update of a layer is.

    Attributes:
        ratio: Frobenius norm of what is added to the frozen weight W, such as ``scaling * B @ A``, over its
            own.
        num_inputs: of the layer.
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
    """Measures the update of each layer that has a LoRA which is trained.

    Args:
        model: with its adapter; its frozen weights do not change, and are read once.
        device: where to compute, unless it has no fp64; no more than some rows of a weight is put there.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, torch.device("cpu") if device.type == "mps" else device
        self._weight_norms: list[float] | None = None

    def measure(self) -> dict[str, UpdateSize]:
        """The update of each layer by the layer's full name, of the adapter's present values."""
        layers = {
            name: part
            for name, part in self._model.named_modules()
            if isinstance(part, BaseTunerLayer) and OWN_ADAPTER in part.r
        }
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

    That of a LoRA, ``scaling * B @ A``, by products of the size of the rank alone: its square is the trace of
    ``(B A)' B A``, which is the sum of ``(B' B) * (A A')``.
    """
    if isinstance(layer, LokrLinear):
        return layer.update_norm(OWN_ADAPTER, device)
    if OWN_ADAPTER in layer.lora_variant:
        return dora_update_norm(layer, OWN_ADAPTER, device)
    down, up = (half[OWN_ADAPTER].weight.to(device).double() for half in (layer.lora_A, layer.lora_B))
    square = ((up.T @ up) * (down @ down.T)).sum()
    # Where the update is nothing, rounding can leave less.
    norm: Tensor = abs(layer.scaling[OWN_ADAPTER]) * square.clamp(min=0).sqrt()
    return norm


def _on_host(scalars: list[Tensor]) -> list[float]:
    """In one transfer; each would wait for the device."""
    return torch.stack(scalars).tolist() if scalars else []
