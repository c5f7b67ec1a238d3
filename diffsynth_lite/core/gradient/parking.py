"""This file copies a tensor to host memory and back, and says which tensors stay where they are."""

from enum import StrEnum

import torch
from torch import Tensor

from diffsynth_lite.core.gradient.backends import Backend, Copy
from diffsynth_lite.core.gradient.host_pool import HostPiece

_MIN_BYTES_ON_ACCELERATORS = 64 * 1024


class LeaveReason(StrEnum):
    """Why a tensor is not parked."""

    BELOW_MIN_BYTES = "below min_bytes"
    PARAMETER = "parameter"
    SUBCLASS = "tensor subclass"
    LAYOUT = "sparse, quantized or conjugated"
    EXPANDED = "expanded view"
    IN_BACKWARD = "inside of a backward pass"
    HOST_FULL = "host memory full"
    REFUSED = "host memory refused by the system"


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
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return LeaveReason.LAYOUT
    if min_bytes is None:
        min_bytes = 0 if tensor.device.type == "cpu" else _MIN_BYTES_ON_ACCELERATORS
    if num_bytes(tensor) < max(min_bytes, 1):
        return LeaveReason.BELOW_MIN_BYTES
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return LeaveReason.EXPANDED if any(size > 1 and stride == 0 for size, stride in sizes) else None


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of ``tensor``; unlike ``nbytes`` it is defined for sparse tensors too."""
    return tensor.numel() * tensor.element_size()


def changed_in_place(shape: torch.Size) -> RuntimeError:
    """The error for an input that no longer is what the forward pass saw."""
    # Autograd makes this check for the tensors that it saves itself, but not for those that hooks keep.
    return RuntimeError(
        f"an input of a checkpointed block, a tensor of shape {tuple(shape)}, was changed in place before "
        "its backward pass"
    )


class KeptTensor:
    """A tensor that stays on its device.

    Args:
        tensor: what to keep; not its history.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def restore(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        if self._tensor._version != self._version:
            raise changed_in_place(self._tensor.shape)
        return self._tensor.detach()


class ParkedTensor:
    """A tensor whose values are copied to host memory, so that it can leave its device and come back.

    Args:
        tensor: one for which there is no ``reason_to_leave``.
        piece: host memory of ``num_bytes(tensor)``.
        backend: makes the copies.
    """

    def __init__(self, tensor: Tensor, piece: HostPiece, backend: Backend) -> None:
        self._copy: Copy | None = None
        self._piece, self._backend = piece, backend
        self._shape, self._strides, self._device = tensor.shape, tensor.stride(), tensor.device
        # The strides of a dense tensor; another one is copied without its gaps.
        self._dense_strides = torch.empty_like(tensor, device="meta", requires_grad=False).stride()
        host = piece.buffer.view(tensor.dtype).as_strided(self._shape, self._dense_strides)
        self._original: Tensor | None = tensor.detach()
        self._version, self._is_changed = tensor._version, False
        self._source: Tensor | None = self._original
        if self._dense_strides != self._strides:
            self._source = self._original.clone()
        self._host = host
        self._arriving: Tensor | None = None
        self._copy = backend.to_host(host, self._source)

    def __del__(self) -> None:
        # Before the memory on both sides goes to somebody else.
        if self._copy is not None:
            self._copy.wait()

    @property
    def is_on_device(self) -> bool:
        """Whether ``restore`` can give the tensor without starting a copy."""
        return self._original is not None or self._arriving is not None

    def leave_device(self) -> None:
        """Let go of the original, once its copy is complete."""
        if self._original is None:
            return
        self._wait()
        # The copy may have read the new values. That is an error if backward asks for them, not before.
        self._is_changed = self._original._version != self._version
        self._original = self._source = None

    def fetch(self) -> None:
        """Start to copy the values back, unless they are on the device or on their way."""
        if self.is_on_device:
            return
        # Allocated on the compute stream, where it is used and freed.
        arriving = torch.empty_strided(
            self._shape, self._dense_strides, dtype=self._host.dtype, device=self._device
        )
        self._copy = self._backend.to_device(arriving, self._host)
        self._arriving = arriving

    def restore(self) -> Tensor:
        """A tensor of the same values, shape, strides, dtype and device; the original while it is there.

        Raises:
            RuntimeError: the original was changed in place before it left.
        """
        if self._is_changed or (self._original is not None and self._original._version != self._version):
            raise changed_in_place(self._shape)
        if self._original is not None:
            return self._original.detach()
        self.fetch()
        self._wait()
        assert self._arriving is not None
        restored, self._arriving = self._arriving, None
        if self._strides == self._dense_strides:
            return restored
        # The strides too: another memory order would choose other kernels, which round differently.
        gapped = torch.empty_strided(self._shape, self._strides, dtype=self._host.dtype, device=self._device)
        return gapped.copy_(restored)

    def _wait(self) -> None:
        assert self._copy is not None
        self._copy.wait()
