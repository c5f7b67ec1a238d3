"""This file has the linear layer of frozen models: its weight is in a format, and made where it is used."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffsynth_lite.core.autocast import autocast_dtype
from diffsynth_lite.core.reports import quantization_lines
from diffsynth_lite.core.weights.formats import WeightFormat
from diffsynth_lite.core.weights.sharding import whole

_ROWS_NUMBERS = 2**22
"""Of a weight whose norm is taken, on the device at once."""


class FrozenLinear(nn.Linear):
    """Replaces a frozen ``nn.Linear``, and is one, so that peft adapts it as any.

    Its two frozen parameters are ordinary tensors: what moves, broadcasts or lists tensors needs to know
    nothing of them. ``weight`` holds the format's values and not numbers to compute with; :meth:`dense`
    gives these. Nothing of the layer is cast by ``.to(dtype)``.

    Args:
        layer: the one to replace, also on the meta device; its weight is not read, its bias is taken over.
        weight_format: what the weight is kept in; it is empty until rows are written.
    """

    def __init__(self, layer: nn.Linear, weight_format: WeightFormat, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.format = weight_format
        self.plain_dtype = layer.weight.dtype
        values, scales = weight_format.empty(self.out_features, self.in_features, device)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.weight_scale = nn.Parameter(scales, requires_grad=False)
        bias = layer.bias
        if bias is not None:  # of the meta device there is nothing to take over
            made = torch.empty_like(bias, device=device)
            bias = nn.Parameter(made if bias.is_meta else made.copy_(bias.detach()), requires_grad=False)
        self.register_parameter("bias", bias)

    @property
    def plain_bytes(self) -> int:
        """Bytes of the weight in a plain layer."""
        return self.out_features * self.in_features * self.plain_dtype.itemsize

    def write(self, rows: Tensor, first_row: int) -> None:
        """Quantise rows of the weight, (R, in_features), on their device, to their place in it."""
        self.format.write(rows, first_row, self.weight.data, self.weight_scale.data)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight (out_features, in_features), to compute with."""
        shape = self.out_features, self.in_features
        return self.format.dense(self.weight, self.weight_scale, shape, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in the input's dtype or autocast's."""
        input = input.to(autocast_dtype(input.device) or input.dtype)
        # A compiler would decompose the function, and have its graph keep the dense weight for backward.
        if torch.compiler.is_compiling():
            output: Tensor = checkpoint(self._product, input, use_reentrant=False)
        else:
            output = _Product.apply(input, self)  # type: ignore[no-untyped-call]
        return output

    def _product(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return nn.functional.linear(x, self.dense(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format.name}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor.to(new.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


class _Product(torch.autograd.Function):
    """``x @ weight.T + bias`` for a frozen layer, whose weight is made once more in backward.

    Autograd would save the weight in its full size for each layer: what the format saves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenLinear) -> Tensor:
        # Nothing is copied. And whoever saves memory sees them as any tensors that backward needs: a
        # checkpointed block runs again first, and streamed weights come back.
        ctx.save_for_backward(layer.weight, layer.weight_scale)
        ctx.layer = layer
        return layer._product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        shape = layer.out_features, layer.in_features
        return grad @ layer.format.dense(*ctx.saved_tensors, shape, grad.dtype), None


def weight_rows(layer: nn.Linear, device: torch.device) -> Iterator[Tensor]:
    """The weight that a plain or a frozen linear layer computes with, some rows at a time, in order.

    Args:
        device: where the rows are to be: at most 64 MiB are there of them at once. A sharded weight is
            gathered before, as a whole, by all processes together.

    Yields:
        Rows (R, in_features), in the weight's dtype or fp32.
    """
    parts, step = [layer.weight], 1
    if isinstance(layer, FrozenLinear):
        parts, step = [layer.weight, layer.weight_scale], layer.format.row_step
    kept = [whole(part.detach()) for part in parts]
    num_rows = max(step, _ROWS_NUMBERS // layer.in_features // step * step)
    for first in range(0, layer.out_features, num_rows):
        rows = range(first, min(first + num_rows, layer.out_features))
        yield _rows_of(layer, kept, rows, device)


def weight_norm(layer: nn.Linear, device: torch.device) -> Tensor:
    """Frobenius norm of the weight that a linear layer computes with, a scalar in fp64."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for rows in weight_rows(layer, device):
        squares += torch.linalg.vector_norm(rows, dtype=torch.float64) ** 2
    return squares.sqrt()


def row_norms(layer: nn.Linear, device: torch.device) -> Tensor:
    """Norm of each row of the weight that a linear layer computes with, (out_features,) in fp32.

    The sums are in fp64, so that it hardly ever shows in the last bit where they were computed.
    """
    norms = [
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) for rows in weight_rows(layer, device)
    ]
    return torch.cat(norms).float()


def _rows_of(layer: nn.Linear, kept: Sequence[Tensor], rows: range, device: torch.device) -> Tensor:
    if not isinstance(layer, FrozenLinear):
        return kept[0][rows.start : rows.stop].to(device)
    values, scales = kept
    own = layer.format.rows(values, scales, rows, layer.in_features)
    values, scales = (part.to(device) for part in own)
    return layer.format.dense(values, scales, (len(rows), layer.in_features), torch.float32)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Which layers of a frozen model are kept in another format than plain.

    Attributes:
        device: where they are quantised, and the model is loaded to.
    """

    format: WeightFormat
    layers: tuple[str, ...]
    device: torch.device

    def apply_to(self, model: nn.Module) -> None:
        """Put a :class:`FrozenLinear`, still empty, in the place of each of the layers, and on its device."""
        for name in self.layers:
            layer = model.get_submodule(name)
            assert type(layer) is nn.Linear, f"{name} is a {type(layer).__name__}"
            model.set_submodule(name, FrozenLinear(layer, self.format, layer.weight.device))


@dataclass(frozen=True, kw_only=True)
class QuantizationReport:
    """What a model keeps in another format than plain; no layers where it keeps none.

    Attributes:
        plain_bytes: what their weights would take in the model's dtype.
    """

    num_layers: int
    num_bytes: int
    plain_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """What is in a model, also one with adapters."""
        layers = [module for module in model.modules() if isinstance(module, FrozenLinear)]
        return cls(
            num_layers=len(layers),
            num_bytes=sum(layer.weight.nbytes + layer.weight_scale.nbytes for layer in layers),
            plain_bytes=sum(layer.plain_bytes for layer in layers),
        )

    def lines(self) -> list[str]:
        """The report for people, in the form of the gradient engine's: at most one line."""
        return quantization_lines(**asdict(self))

    def metrics(self) -> dict[str, float]:
        """Each number by its name; none where nothing is quantised."""
        if not self.num_layers:
            return {}
        return {
            "layers_quantised": self.num_layers,
            "bytes_quantised": self.num_bytes,
            "bytes_before_quantisation": self.plain_bytes,
        }
