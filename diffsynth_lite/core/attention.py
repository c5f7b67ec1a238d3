"""This file has models of diffusers compute attention by a named kernel, and tries that first.

diffusers calls a kernel a backend; its models find it by name (``models/attention_dispatch.py``). Those whose
attention calls torch by itself cannot be given one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_TORCHS = ("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math")
WITHOUT_MASKS = ("flash", "_native_flash")
_NUM_TOKENS, _NUM_HEADS = 128, 2
_TOLERANCE = 0.05
"""Of the largest value; in 16 bits kernels differ by a fifth of it."""


def use_backend(model: nn.Module, backend: str) -> None:
    """Have attention of a model computed by a backend.

    What runs outside of them, such as a VAE, is not changed, and neither is diffusers' own default.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    for module in list(_modules_with_backend(model)):
        module.processor._attention_backend = AttentionBackendName(backend)
        if backend not in _TORCHS:
            keep_dtype(module)


def has_backends(model: nn.Module) -> bool:
    """Whether attention of a model is computed by a backend that can be chosen."""
    return next(_modules_with_backend(model), None) is not None


def _modules_with_backend(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(getattr(module, "processor", None), "_attention_backend"):
            yield module


def require_backend(backend: str, device: torch.device, dtype: torch.dtype, *, head_width: int) -> None:
    """Check that a backend computes attention and its gradients on a device, as torch's own does.

    Raises:
        ValueError: it does not; the message has the reason.
    """
    from diffusers.models import attention_dispatch as diffusers_attention

    try:
        diffusers_attention._check_attention_backend_requirements(
            diffusers_attention.AttentionBackendName(backend)
        )
        found = _output_and_gradients(backend, device, dtype, head_width)
    except (RuntimeError, ValueError, TypeError, ImportError, NotImplementedError, AssertionError) as error:
        raise ValueError(f"does not run here: {str(error).partition(chr(10))[0]}") from error
    expected = _output_and_gradients("native", device, dtype, head_width)
    for one, other in zip(found, expected, strict=True):
        if not (one - other).abs().max() <= _TOLERANCE * other.abs().max():
            raise ValueError(f"computes something else than torch on {device.type} in {dtype}")


def _output_and_gradients(
    backend: str, device: torch.device, dtype: torch.dtype, head_width: int
) -> list[Tensor]:
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    generator = torch.Generator().manual_seed(0)
    shape = (4, 1, _NUM_TOKENS, _NUM_HEADS, head_width)
    values = torch.randn(shape, generator=generator).to(device, dtype)
    *given, weight = values.unbind()
    for tensor in given:
        tensor.requires_grad_()
    with torch.enable_grad():
        output: Tensor = dispatch_attention_fn(*given, backend=AttentionBackendName(backend))
        if not output.requires_grad:
            raise ValueError("it has no gradients")
        gradients = torch.autograd.grad((output * weight).sum(), given)
    return [output.detach(), *gradients]


def keep_dtype(attention: nn.Module) -> None:
    """Have the norms of queries and keys give what they are given, where autocast makes 32 bits of it.

    CUDA's does of ``rms_norm``. Attention that is split over processes is not under it in its backward pass,
    and kernels that are not torch's never are: they take queries, keys and values as they are, which must all
    be of one dtype.
    """
    for name, module in attention.named_children():
        if name.startswith("norm_"):
            module.register_forward_hook(lambda _, inputs, output: output.to(inputs[0].dtype))
