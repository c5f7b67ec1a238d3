"""This file has the layer of a LoKr, whose update is a Kronecker product that is never made."""

from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.lokr.layer import Linear
from torch import Tensor, nn

from diffsynth_lite.core.autocast import autocast_dtype, shared_cast

_PARTS = ("", "_a", "_b")
"""What the names of a matrix have at their ends: of a whole one, or of the two that it is the product of."""


class LokrLinear(Linear):  # type: ignore[misc]  # peft has no types
    """peft's layer, of which each forward makes the update of the weight as a whole, and keeps it for
    backward.

    The product with ``kron(left, right)`` is one with each of the two instead: a fraction of the work, and
    nothing as large as the weight. peft's own also reads the shape of what a quantised layer keeps.
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
        """What the left and the right matrix of the Kronecker product are the products of: one each, or
        two."""
        held = [[getattr(self, f"{side}{part}") for part in _PARTS] for side in ("lokr_w1", "lokr_w2")]
        left, right = ([one[adapter] for one in side if adapter in one] for side in held)
        return left, right

    def hold(self, adapter: str, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """Give an adapter other factors than peft made, of any sizes that fit the layer, in fp32."""
        device = self.get_base_layer().weight.device
        for side, matrices in (("lokr_w1", left), ("lokr_w2", right)):
            parts = dict(zip(("",) if len(matrices) == 1 else ("_a", "_b"), matrices, strict=True))
            for part in _PARTS:
                held = getattr(self, f"{side}{part}")
                if adapter in held:
                    del held[adapter]
                if part in parts:
                    held[adapter] = nn.Parameter(parts[part].to(device, torch.float32))

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
        # Of the small matrix, so that no multiplication has the size of the output.
        outer = _product(left) * self.scaling[adapter]
        columns = right[-1].shape[1]
        inner = self._cast_input_dtype(x, outer.dtype).unflatten(-1, (outer.shape[1], columns))
        for matrix in reversed(right):
            inner = nn.functional.linear(inner, matrix)
        across = nn.functional.linear(inner.transpose(-1, -2), outer)
        return across.transpose(-1, -2).flatten(-2)


def _product(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] @ parts[1]
