"""A kernel of attention is tried on the device before a run, and given to a model by its name."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn

from diffsynth_lite.core.attention import require_backend, use_backend

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        *(("native", ""), ("_native_math", ""), ("_native_flash", "")),
        ("flash", "does not run here: .* install `flash-attn>="),
        ("xformers", "does not run here: .* install `xformers>="),
        ("_native_efficient", "does not run here: No viable backend"),
    ],
)
def test_a_kernel_that_is_not_installed_or_not_for_the_device_is_refused(backend: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) if reason else nullcontext():
        require_backend(backend, CPU, torch.bfloat16, head_width=64)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda output: output.detach(), "does not run here: it has no gradients"),
        (lambda output: 1.2 * output, "computes something else than torch on cpu in torch.float32"),
        (lambda output: output * float("nan"), "computes something else"),
        (lambda output: output.detach() + 2 * (output - output.detach()), "computes something else"),
    ],
)
def test_a_kernel_with_wrong_values_or_gradients_is_refused(
    changed: Callable[[Tensor], Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]

    def wrong(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return changed(native(query, key, value))

    name = AttentionBackendName._NATIVE_MATH
    monkeypatch.setitem(_AttentionBackendRegistry._backends, name, wrong)
    monkeypatch.setitem(_AttentionBackendRegistry._supported_arg_names, name, {"query", "key", "value"})
    with pytest.raises(ValueError, match=reason):
        require_backend(name.value, CPU, torch.float32, head_width=64)


@pytest.mark.parametrize(("backend", "dtype"), [("flash", torch.bfloat16), ("native", torch.float32)])
def test_only_kernels_of_others_get_queries_and_keys_in_the_dtype_of_values(
    backend: str, dtype: torch.dtype
) -> None:
    class InFloat32(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    attention = nn.Module()
    attention.norm_q = InFloat32()
    attention.processor = SimpleNamespace(_attention_backend=None)
    use_backend(nn.Sequential(attention, nn.Linear(2, 2)), backend)
    assert attention.processor._attention_backend == backend
    assert attention.norm_q(torch.zeros(2, dtype=torch.bfloat16)).dtype == dtype
