"""This file copies a tensor to host memory and back, and says which tensors stay where they are."""

from enum import StrEnum

import torch
from torch import Tensor

_MIN_BYTES_ON_ACCELERATORS = 64 * 1024


class LeaveReason(StrEnum):
    """Why a tensor is not parked."""

    BELOW_MIN_BYTES = "below min_bytes"
    PARAMETER = "parameter"
    SUBCLASS = "tensor subclass"
    LAYOUT = "sparse or quantized"


def reason_to_leave(tensor: Tensor, min_bytes: int | None) -> LeaveReason | None:
    """Why ``tensor`` should stay on its device, or None if it can be parked.

    Args:
        tensor: any tensor.
        min_bytes: smaller tensors stay, and empty ones always. None: 64 KiB on accelerators, so that nothing
            waits for copies that free next to nothing; 0 on CPU, where parking is rehearsed, not needed.
    """
    if isinstance(tensor, torch.nn.Parameter):
        return LeaveReason.PARAMETER
    if type(tensor) is not Tensor:
        return LeaveReason.SUBCLASS
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return LeaveReason.LAYOUT
    if min_bytes is None:
        min_bytes = 0 if tensor.device.type == "cpu" else _MIN_BYTES_ON_ACCELERATORS
    return LeaveReason.BELOW_MIN_BYTES if num_bytes(tensor) < max(min_bytes, 1) else None


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of ``tensor``; unlike ``nbytes`` it is defined for sparse tensors too."""
    return tensor.numel() * tensor.element_size()


class ParkedTensor:
    """A copy of a tensor in host memory.

    It is a snapshot: a change made to the tensor in place afterwards does not reach it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device, self._shape, self._strides = tensor.device, tensor.shape, tensor.stride()
        # An expanded dimension (stride 0) is copied once: its elements are the same memory.
        sizes = zip(self._shape, self._strides, strict=True)
        distinct = [1 if stride == 0 else size for size, stride in sizes]
        self._host = tensor.detach().as_strided(distinct, self._strides).to("cpu", copy=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that were copied."""
        return num_bytes(self._host)

    def restore(self) -> Tensor:
        """A new tensor of the same values, shape, strides, dtype and device."""
        # The strides too: another memory order would choose other kernels, which round differently.
        restored = torch.empty_strided(
            self._host.shape, self._strides, dtype=self._host.dtype, device=self._device
        )
        return restored.copy_(self._host).as_strided(self._shape, self._strides)
