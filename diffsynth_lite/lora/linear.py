"""This file has the linear layer with a LoRA: peft's own, which keeps and does less for the same bits.

Under autocast peft casts a layer's input once for the frozen product and once for the LoRA's, which keeps the
cast for backward. So query, key and value keep three copies of one tensor, and what is in the lower precision
already goes to fp32 and back first. Here all that read a tensor share one cast of it. And an update that is
scaled by 1 is not multiplied.
"""

from typing import Any

from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

from diffsynth_lite.core.autocast import autocast_dtype, shared_cast
from diffsynth_lite.core.weights import FrozenLinear
from diffsynth_lite.lora.kinds.dora import DoraVariant, dora_output


class LoraLinear(Linear):  # type: ignore[misc]  # peft has no types
    """peft's layer, with the same bits of values and gradients; a DoRA is computed in another way."""

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        return {(): None, ("use_dora",): DoraVariant}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """(..., in_features) to (..., out_features), in the dtype of the frozen layer's output."""
        adapter = self._adapter_alone()
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

    def _adapter_alone(self) -> str | None:
        """The one adapter of the layer that is active, if it has no dropout."""
        active: list[str] = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1 or self.disable_adapters or self.merged:
            return None
        (name,) = active
        return name if isinstance(self.lora_dropout[name], nn.Identity) else None


def use_lora_linear(config: LoraConfig) -> None:
    """Have peft put a :class:`LoraLinear` around plain and frozen layers; others get what peft has."""

    def layer_around(target: nn.Module, adapter_name: str, **kwargs: Any) -> LoraLinear | None:
        is_known = type(target) in (nn.Linear, FrozenLinear)
        return LoraLinear(target, adapter_name, **kwargs) if is_known else None

    config._register_custom_module({nn.Linear: layer_around})
