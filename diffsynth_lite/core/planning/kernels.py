"""This file has a model on the meta device call what it would call on a GPU, so that it can be counted.

On meta torch decomposes attention and norms, and has no autocast. Here attention is one kernel, and
so may be the norm that GPUs have one for; autocast is done as on CUDA. Masks have no values there: they hold
for all, as those of the longest prompts do.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from diffsynth_lite.core.autocast import autocast_dtype, autocast_off_on_meta, autocast_on_meta

_META = torch.device("meta")
IN_LOWER_PRECISION = frozenset(
    (
        *("conv1d", "conv2d", "conv3d", "conv_tbc", "convolution"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("addmm", "addmv", "addr", "addbmm", "baddbmm", "bmm", "mm", "mv", "matmul", "einsum"),
        *("chain_matmul", "linalg_multi_dot", "linalg_vecdot"),
        *("linear", "prelu", "scaled_dot_product_attention"),
    )
)
"""Functions whose inputs autocast casts on CUDA.

Source, as of the next two: ``ATen/autocast_mode.h`` of torch 2.13, without losses, recurrent cells and what
has no function of its own.
"""
IN_FLOAT32 = frozenset(
    (
        *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "logsumexp"),
        *("pow", "reciprocal", "rsqrt", "sinh", "softplus", "tan", "renorm", "dist", "cdist", "pdist"),
        *("layer_norm", "rms_norm", "group_norm", "cosine_similarity", "mse_loss", "interpolate"),
    )
)
"""Those whose inputs it casts to fp32; ``interpolate`` stands for all ``upsample_...``."""
TO_FLOAT32 = frozenset(("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum"))
"""Those that it has return fp32 unless they are given a dtype."""


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = query.new_zeros(attn_mask.shape)  # made of it: kernels add it to the scores
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = kernel(query, key, value, attn_mask=attn_mask)[0]
    return output


def _normalize(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    output: Tensor = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
    return output


def _choose(condition: Tensor, *values: Any, **named: Any) -> Any:
    """As ``torch.where``, also by a mask on the CPU: some models look at the numbers of theirs."""
    is_on_meta = any(isinstance(value, Tensor) and value.is_meta for value in values)
    return torch.where(condition.to(_META) if is_on_meta else condition, *values, **named)


def _take(tensor: Tensor, place: Any) -> Tensor:
    picked: Tensor
    if isinstance(place, Tensor) and place.is_meta and place.dtype == torch.bool:
        picked = tensor[:0] if getattr(place, "is_inverted", False) else tensor.clone()
    else:
        picked = tensor[place]
    return picked


def _invert(mask: Tensor) -> Tensor:
    inverted: Tensor = ~mask
    if mask.is_meta:
        vars(inverted)["is_inverted"] = not getattr(mask, "is_inverted", False)
    return inverted


def _holds(tensor: Tensor) -> bool:
    return tensor.is_meta or bool(tensor)


Replacements = Mapping[Any, Callable[..., Any]]
"""What is called in place of functions."""

MASKS: Replacements = {Tensor.__getitem__: _take, Tensor.__invert__: _invert, Tensor.__bool__: _holds}
"""Those on meta hold for all; others are asked."""
ON_ALL_DEVICES: Replacements = {
    functional.scaled_dot_product_attention: _attend,
    torch.where: _choose,
    **MASKS,
}
"""Attention is one kernel on the CPU, too."""
ON_CUDA: Replacements = {**ON_ALL_DEVICES, functional.rms_norm: _normalize}


class FusedKernels(TorchFunctionMode):
    """Scope in which functions run in one kernel that torch decomposes on meta, or that look at values.

    In it a model may also switch autocast off on meta.
    """

    def __init__(self, replaced: Replacements) -> None:
        super().__init__()
        self._replaced = replaced
        self._autocast = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._autocast.enter_context(autocast_off_on_meta())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._autocast.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._replaced.get(func, func)(*args, **(kwargs or {}))


class CudaAutocast(TorchFunctionMode):
    """Scope of autocast to bf16, as on CUDA, for a model on the meta device.

    What other functions call inside of themselves is not cast. Layers of ours ask for the dtype.
    """

    def __init__(
        self, in_float32: frozenset[str] = IN_FLOAT32, to_float32: frozenset[str] = TO_FLOAT32
    ) -> None:
        super().__init__()
        self._in_float32, self._to_float32 = in_float32, to_float32
        self._casts: dict[nn.Parameter, Tensor] = {}
        self._is_forward = False
        self._dtype = ExitStack()
        self._release: Callable[[nn.Parameter], object] = lambda _: None

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._dtype.enter_context(autocast_on_meta(torch.bfloat16))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._dtype.close()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    @classmethod
    def of_the_cpu(cls) -> "CudaAutocast":
        """As on the CPU, where norms and sums stay in bf16."""
        return cls(frozenset(), frozenset())

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Scope of the model's forward pass, in which a trained weight is cast once and kept to its end."""
        self._is_forward = True
        try:
            with self:
                yield
        finally:
            self._is_forward = False
            for weight in list(self._casts):
                self._release(weight)
                del self._casts[weight]

    @contextmanager
    def on_cast_released(self, release: Callable[[nn.Parameter], object]) -> Iterator[None]:
        """Scope in which ``release`` is called with each weight before its cast is freed."""
        before, self._release = self._release, release
        try:
            yield
        finally:
            self._release = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if autocast_dtype(_META) is None:  # switched off for a part of the model
            return func(*args, **kwargs)
        if name in IN_LOWER_PRECISION:
            return func(*map(self._lower, args), **{key: self._lower(one) for key, one in kwargs.items()})
        if name in self._in_float32:
            return func(*map(_upper, args), **{key: _upper(one) for key, one in kwargs.items()})
        if name in self._to_float32 and _is_castable(args[0]) and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float32}
        return func(*args, **kwargs)

    def _lower(self, value: Any) -> Any:
        if not _is_castable(value) or value.dtype == torch.bfloat16:
            return value
        if not (self._is_forward and isinstance(value, nn.Parameter) and value.requires_grad):
            return value.to(torch.bfloat16)
        if value not in self._casts:
            self._casts[value] = value.to(torch.bfloat16)
        return self._casts[value]


def backward_in_scope(loss: Tensor) -> None:
    """The backward pass of ``loss``, under the scopes of this file that are entered; gradients are kept."""
    # What backward() calls: itself it would leave the scopes, which the recompute needs.
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,),
        (torch.ones_like(loss),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _upper(value: Any) -> Any:
    return value.float() if _is_castable(value) else value


def _is_castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
