"""This file counts the bytes of the tensors that are alive while something runs, on any device or on meta."""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from diffsynth_lite.core.planning.meta_results import MetaResults, tensors_in
from diffsynth_lite.core.transfer.backends import PlainBackend


class LiveBytes:
    """Bytes of tensor storages, each counted once and as long as it is alive.

    Attributes:
        num_bytes: now.
        peak_bytes: most since it was last set.
    """

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0
        self._storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def add(self, tensor: Tensor, *, is_counted: bool = True) -> None:
        """Count the storage of ``tensor`` from now on, unless it is known; or know it as not counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes() if is_counted else 0
        self._storages[key] = weakref.ref(storage, lambda _: self._forget(key)), size
        self._grow(size)

    def ignore(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` no longer."""
        self._forget(tensor.untyped_storage()._cdata)
        self.add(tensor, is_counted=False)

    def _forget(self, key: int) -> None:
        _, size = self._storages.pop(key, (None, 0))
        self._grow(-size)

    def _grow(self, size: int) -> None:
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)


class IgnoresTensors(Protocol):
    """A meter that can leave tensors out."""

    def ignore(self, tensor: Tensor) -> None:
        """From now on ``tensor`` stands for host memory."""


class CountingMeter(TorchDispatchMode):
    """Memory of the storages that operators return. What kernels use inside of themselves is not seen.

    Args:
        device: whose memory is counted; None counts that of all.
        results: of operators on meta, where other meters share them.
    """

    def __init__(self, device: torch.device | None = None, results: MetaResults | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results or MetaResults()
        self._live, self._before, self._device = LiveBytes(), 0, device

    def start(self) -> None:
        """Begin to measure: what is there now does not count."""
        self._before = self._live.peak_bytes = self._live.num_bytes

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self._live.peak_bytes = self._live.num_bytes

    def reach(self, num_bytes: int) -> None:
        """Note that so many bytes are held for a moment."""
        self._live.peak_bytes = max(self._live.peak_bytes, self._before + num_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes now."""
        return self._live.num_bytes - self._before

    @property
    def peak_bytes(self) -> int:
        """Most bytes since the measurement, or the last search for a peak, began."""
        return self._live.peak_bytes - self._before

    def ignore(self, tensor: Tensor) -> None:
        """From now on ``tensor`` stands for host memory."""
        self._live.ignore(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((*args, *kwargs.values())):
            self._live.add(tensor, is_counted=False)  # from outside
        value = self._results.of(func, args, kwargs)
        for tensor in tensors_in((value,)):
            self._live.add(tensor, is_counted=self._device in (None, tensor.device))
        return value


class HostBackend(PlainBackend):
    """Plain copies into memory that stands for the host's: on ``device`` itself, but not counted there."""

    def __init__(self, device: torch.device, meter: IgnoresTensors) -> None:
        self._device, self._meter = device, meter

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._meter.ignore(buffer)
        return buffer
