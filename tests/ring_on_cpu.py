"""diffusers' ring on the CPU: it asks for torch's flash attention for CUDA, and gets that for the CPU."""

from typing import Any

import torch
from diffusers.models import attention_dispatch
from torch import Tensor

from diffsynth_lite.training.distributed import context

_ATEN = torch.ops.aten


def forward(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_options: object,
    _save_ctx: bool = True,
    **_more: object,
) -> tuple[Tensor, Tensor]:
    """Attention, (B, L, H, D), and its log-sum-exp, (B, L, H)."""
    given = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    output, log_sum_exp = _ATEN._scaled_dot_product_flash_attention_for_cpu(*given)
    if _save_ctx:
        ctx.save_for_backward(query, key, value)
    return output.transpose(1, 2), log_sum_exp.transpose(1, 2)


def backward(ctx: Any, grad: Tensor, **of_the_ring: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key and value, by the result and the log-sum-exp of all keys."""
    names = ("query", "key", "value", "out", "lse")
    given = [tensor.transpose(1, 2) for tensor in (grad, *(of_the_ring[name] for name in names))]
    found = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, False)
    return tuple(gradient.transpose(1, 2) for gradient in found)


def allow_rings() -> None:
    """Have this process run rings on the CPU, until it ends."""
    attention_dispatch._native_flash_attention_forward_op = forward
    attention_dispatch._native_flash_attention_backward_op = backward
    context._RING_DEVICES = ("cpu", "cuda")
