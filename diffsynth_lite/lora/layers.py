"""This file has peft's layers with an adapter, computed in another way: LoRA, DoRA and LoKr.

The row o of the weight that a DoRA computes with is ``magnitude[o] * (W + s B A)[o] / |(W + s B A)[o]|``
(Liu et al. 2024, arXiv:2402.09353, equation 5), and no gradient flows through the norm (section 4.3).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lokr import layer as lokr
from peft.tuners.lora import layer as lora
from torch import Tensor, nn

from diffsynth_lite.core.autocast import autocast_dtype, shared_cast
from diffsynth_lite.core.weights.frozen_linear import FrozenLinear, row_norms, weight_rows
from diffsynth_lite.errors import UserError

MAGNITUDE = ".lora_magnitude_vector"
"""End of the name of a tensor with magnitudes, after its layer's name."""
COMFYUI_SCALE = ".dora_scale"
"""End of the name of the tensor for ComfyUI that is computed from them when a file is written."""


class Magnitude(nn.Module):
    """The norms of a layer's rows: those that train, and those of the frozen weight."""

    row_norms: Tensor

    def __init__(self, num_outputs: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs, device=device))
        self.register_buffer("row_norms", torch.empty(num_outputs, device=device), persistent=False)


class DoraVariant(lora.LoraVariant):  # type: ignore[misc]  # peft has no types
    """The DoRA that peft calls for a layer in place of its own.

    peft's own computes the whole W + s B A in each forward, and takes the storage of a quantised layer for
    its weight.
    """

    @staticmethod
    def init(module: Any, adapter_name: str, **kwargs: Any) -> None:
        device = module.get_base_layer().weight.device
        module.lora_magnitude_vector[adapter_name] = Magnitude(module.out_features, device)

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any) -> Tensor:
        return dora_output(module, active_adapter, x, result)


def fill_magnitudes(
    model: nn.Module, layers: Sequence[str], adapter: str, device: torch.device | None = None
) -> None:
    """Set the magnitudes of a new DoRA to the norms of the frozen weights' rows, so that it changes nothing.

    Args:
        device: to read the weights on; None is where they are.
    """
    for name in layers:
        layer: Any = model.get_submodule(name)
        base, magnitude = layer.get_base_layer(), layer.lora_magnitude_vector[adapter]
        if not isinstance(magnitude, Magnitude):
            raise UserError(
                f"lora.kind: dora is for plain linear layers, and {name} is a {type(base).__name__}; leave "
                "it out of lora.target_modules"
            )
        # Done after peft, which would create it in the dtype of the base.
        magnitude.float()
        if not base.weight.is_meta:
            norms = row_norms(base, device or base.weight.device)
            magnitude.row_norms.copy_(norms)
            magnitude.weight.data.copy_(norms)


def dora_output(layer: Any, adapter: str, x: Tensor, result: Tensor) -> Tensor:
    """Output of a layer with a DoRA.

    Args:
        x: (..., inputs), in the dtype that the LoRA computes in.
        result: (..., outputs), output of the frozen layer.

    Returns:
        (..., outputs) in the dtype of ``result``. Where peft's scale for the adapter is not that of its
        training, the change of the output is multiplied with their ratio, so that 0 is the frozen layer.
    """
    down, up = layer.lora_A[adapter], layer.lora_B[adapter].weight
    base, magnitude = layer.get_base_layer(), layer.lora_magnitude_vector[adapter]
    scaling = _scaling(layer, adapter)
    with torch.no_grad():
        product = _frozen_product(base, down.weight)
        norms = _RowSums.of(magnitude.row_norms, product, down.weight, up, scaling).norms
    ratio = magnitude.weight / norms
    # The rows of B, not the output: nothing of its size is kept for backward.
    update = nn.functional.linear(down(layer.lora_dropout[adapter](x)), up * (scaling * ratio)[:, None])
    plain = result if base.bias is None else result - base.bias.to(result.dtype)
    change = (ratio - 1).to(result.dtype) * plain + update
    if (strength := layer.scaling[adapter] / scaling) != 1:
        change = strength * change
    output: Tensor = (result + change).to(result.dtype)
    return output


def scales_for_comfyui(
    model: nn.Module, tensors: Mapping[str, Tensor], adapter: str, device: torch.device
) -> dict[str, Tensor]:
    """The ``dora_scale`` that ComfyUI reads for a DoRA, (outputs,) in fp32 on the CPU, by name.

    ComfyUI multiplies the rows of W + s B A with it over the norms of W (``weight_decompose`` in its
    ``comfy/weight_adapter/base.py``). For the same result it is the magnitudes times the norms of W over
    those of W + s B A.

    Args:
        tensors: of it, by peft's names; none has magnitudes in a LoRA or LoKr.
    """
    scales = {}
    for key, trained in tensors.items():
        if key.endswith(MAGNITUDE):
            name = key.removesuffix(MAGNITUDE)
            layer: Any = model.get_submodule(name)
            down, up = (tensors[f"{name}.lora_{half}.weight"].to(device) for half in "AB")
            sums = _exact_sums(layer, adapter, down, up, device)
            ratio = sums.of_weight.sqrt() / sums.norms
            scales[f"{name}{COMFYUI_SCALE}"] = (trained.to(device) * ratio).float().cpu()
    return scales


def dora_update_norm(layer: Any, adapter: str, device: torch.device) -> Tensor:
    """Frobenius norm of the change of a layer's weight by a DoRA, a scalar in fp64.

    For a row that is multiplied by r: ``r (W + s B A) - W = (r - 1) W + r s B A``.
    """
    down, up = (half[adapter].weight.detach().to(device) for half in (layer.lora_A, layer.lora_B))
    sums = _exact_sums(layer, adapter, down, up, device)
    ratio = layer.lora_magnitude_vector[adapter].weight.detach().to(device) / sums.norms
    crossed = (ratio - 1) * ratio * sums.crossed
    squares = (ratio - 1) ** 2 * sums.of_weight + crossed + ratio**2 * sums.of_update
    norm: Tensor = squares.sum().clamp(min=0).sqrt()
    return norm


@dataclass(frozen=True)
class _RowSums:
    """Terms of the squared norms of the rows of W + s B A, (outputs,) each.

    Attributes:
        of_weight: ``|W|^2``.
        crossed: ``2 s <W, B A>``.
        of_update: ``s^2 |B A|^2``.
    """

    of_weight: Tensor
    crossed: Tensor
    of_update: Tensor

    @classmethod
    def of(cls, norms: Tensor, product: Tensor, down: Tensor, up: Tensor, scaling: float) -> "_RowSums":
        """By products as wide as the rank.

        Args:
            norms: of the rows of W, (outputs,).
            product: A W', (rank, outputs).
            down: A, (rank, inputs).
            up: B, (outputs, rank).
            scaling: s.
        """
        return cls(
            of_weight=norms**2,
            crossed=2 * scaling * (product.T * up).sum(dim=1),
            of_update=scaling**2 * ((up @ (down @ down.T)) * up).sum(dim=1),
        )

    @property
    def norms(self) -> Tensor:
        """Of the rows of W + s B A; 1 for one of zeros. Where B is zero they are exactly those of W."""
        squares = self.of_weight + self.crossed + self.of_update
        return torch.where(squares > 0, squares, 1).sqrt()


def _scaling(layer: Any, adapter: str) -> float:
    """The scaling of the adapter's training; peft's own may be multiplied with a weight."""
    scaling: float = layer.lora_alpha[adapter] / layer.r[adapter]
    return scaling


def _frozen_product(base: nn.Linear, down: Tensor) -> Tensor:
    """A W' as the layer computes, (rank, outputs) in fp32."""
    weight = base.weight
    if isinstance(base, FrozenLinear):
        weight = base.dense(autocast_dtype(down.device) or down.dtype)
    return nn.functional.linear(down.to(weight.dtype), weight).float()


def _exact_sums(layer: Any, adapter: str, down: Tensor, up: Tensor, device: torch.device) -> _RowSums:
    """In fp64, of a weight that may be anywhere."""
    norms = layer.lora_magnitude_vector[adapter].row_norms.to(device).double()
    rows = weight_rows(layer.get_base_layer(), device)
    product = torch.cat([down.float() @ part.float().T for part in rows], dim=1).double()
    return _RowSums.of(norms, product, down.double(), up.double(), _scaling(layer, adapter))


_PARTS = ("", "_a", "_b")
"""Ends of a matrix' names: of the whole matrix, or of the two factors that it is the product of."""


class LokrLinear(lokr.Linear):  # type: ignore[misc]  # peft has no types
    """peft's layer, of which each forward makes the update of the weight as a whole, and keeps it for
    backward.

    Here the input is multiplied with each of the two matrices of ``kron(left, right)`` instead: a fraction of
    the work, and nothing as large as the weight. peft's own also uses the shape of a quantised layer's
    storage.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in_features) to (..., out_features), in the dtype of the frozen layer's output."""
        lower = autocast_dtype(x.device)
        x = x if lower is None else shared_cast(x, lower)
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        output = result
        for adapter in self.active_adapters:
            if adapter in self._available_adapters:
                output = output + self._update(adapter, x)
        return output.to(result.dtype)

    def factors(self, adapter: str) -> tuple[list[Tensor], list[Tensor]]:
        """Factors of the left and the right matrix of the Kronecker product: one or two each."""
        held = [[getattr(self, f"{side}{part}") for part in _PARTS] for side in ("lokr_w1", "lokr_w2")]
        left, right = ([one[adapter] for one in side if adapter in one] for side in held)
        return left, right

    def hold(self, adapter: str, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """Replace peft's factors of an adapter by others, of any sizes that fit the layer, in fp32."""
        (first, *_), _ = self.factors(adapter)  # where it computes: a streamed base may wait elsewhere
        for side, matrices in (("lokr_w1", left), ("lokr_w2", right)):
            parts = dict(zip(("",) if len(matrices) == 1 else ("_a", "_b"), matrices, strict=True))
            for part in _PARTS:
                held = getattr(self, f"{side}{part}")
                if adapter in held:
                    del held[adapter]
                if part in parts:
                    held[adapter] = nn.Parameter(parts[part].to(first.device, torch.float32))

    def update_norm(self, adapter: str, device: torch.device) -> Tensor:
        """Frobenius norm of the update, a scalar in fp64: the product of those of its two matrices."""
        norms = [
            torch.linalg.matrix_norm(_product([part.detach().to(device).double() for part in parts]))
            for parts in self.factors(adapter)
        ]
        norm: Tensor = abs(self.scaling[adapter]) * norms[0] * norms[1]
        return norm

    def _update(self, adapter: str, x: Tensor) -> Tensor:
        left, right = self.factors(adapter)
        # The small matrix is scaled, so that no multiplication has the size of the output.
        outer = _product(left) * self.scaling[adapter]
        columns = right[-1].shape[1]
        inner = self._cast_input_dtype(x, outer.dtype).unflatten(-1, (outer.shape[1], columns))
        for matrix in reversed(right):
            inner = nn.functional.linear(inner, matrix)
        across = nn.functional.linear(inner.transpose(-1, -2), outer)
        return across.transpose(-1, -2).flatten(-2)


def _product(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] @ parts[1]


class LoraLinear(lora.Linear):  # type: ignore[misc]  # peft has no types
    """peft's layer, with the same bits of values and gradients; a DoRA is computed in another way."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {(): None, ("use_dora",): DoraVariant}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in_features) to (..., out_features), in the dtype of the frozen layer's output."""
        adapter = self._only_adapter()
        if adapter is None or args or kwargs:
            by_peft: Tensor = super().forward(x, *args, **kwargs)
            return by_peft
        down, up, scaling = self.lora_A[adapter], self.lora_B[adapter], self.scaling[adapter]
        lower = autocast_dtype(x.device)
        if lower is None:
            result = self.base_layer(x)
            inner = self._cast_input_dtype(x, down.weight.dtype)
        else:
            result = self.base_layer(shared_cast(x, lower))
            inner = shared_cast(x, lower)
        if adapter in self.lora_variant:
            return dora_output(self, adapter, inner, result)
        update = up(down(inner))
        if scaling != 1:
            update = update * scaling
        output: Tensor = (result + update).to(result.dtype)
        return output

    def _only_adapter(self) -> str | None:
        """The layer's only active adapter, if it has no dropout."""
        active: list[str] = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1 or self.disable_adapters or self.merged:
            return None
        (name,) = active
        return name if isinstance(self.lora_dropout[name], nn.Identity) else None


def use_lora_linear(config: LoraConfig) -> None:
    """Have peft put a :class:`LoraLinear` around plain and frozen layers, and its own class around others."""

    def layer_around(target: nn.Module, adapter_name: str, **kwargs: Any) -> LoraLinear | None:
        is_known = type(target) in (nn.Linear, FrozenLinear)
        return LoraLinear(target, adapter_name, **kwargs) if is_known else None

    config._register_custom_module({nn.Linear: layer_around})
