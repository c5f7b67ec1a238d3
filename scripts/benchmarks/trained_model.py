"""A model of any kind, ready for training steps on any device; on meta nothing of them is computed."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from diffsynth_lite.core.planning import ON_ALL_DEVICES, FusedKernels, backward_in_scope
from diffsynth_lite.pipelines.base.quantized import kept_in_fp32


class TrainedModel:
    """A model with an input, ready for training steps.

    Args:
        model: with its blocks as they are; it is put into training mode.
        device: cpu, cuda, or meta, where nothing is computed but every tensor has its size.
        dtype: of the weights.
        lora: adapters to train; the model's own weights are then frozen. None: they train.
        adapter_dtype: of the adapters' weights.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        lora: LoraConfig | None = None,
        adapter_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.device, self.model = device, model.train()
        _cast_weights(self.model, dtype)
        if lora is not None:
            self.model.requires_grad_(False)
            self.model.add_adapter(lora)
            for weight in self.trained():
                weight.data = weight.data.to(device, adapter_dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(weight.nbytes for weight in self.model.parameters())

    def trained(self) -> list[nn.Parameter]:
        """The weights that train."""
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def backward(self, loss: Tensor) -> None:
        """The backward pass of ``loss``."""
        if self.device.type != "meta":
            loss.backward()
            return
        with self.attention():
            backward_in_scope(loss)

    def attention(self) -> AbstractContextManager[Any]:
        """Scope in which attention is one kernel, also on meta."""
        return FusedKernels(ON_ALL_DEVICES) if self.device.type == "meta" else nullcontext()


def _cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast to ``dtype``, but for the parts that ``from_pretrained`` keeps in float32."""
    for name, weight in model.named_parameters():
        if not kept_in_fp32(model, name):
            weight.data = weight.data.to(dtype)
