"""This file copies tensors between a device and host memory: on streams of their own, or plainly."""

import contextlib
import logging
import mmap
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_MIN_BYTES_ON_ACCELERATORS = 64 * 1024


class Copy(Protocol):
    """A copy that may still be under way."""

    def wait(self) -> None:
        """Let whatever is computed from now on come after the copy; the host itself need not wait."""


class Backend(Protocol):
    """Copies between one device and host memory.

    Every copy comes after what was computed, and after every copy that was waited for, before it started.
    Both tensors of a copy must live until it was waited for.
    """

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        """Host memory that copies are fast from and to, uint8; None when the system refuses.

        Args:
            descriptor: of an open file that is mapped, and has at least so many bytes; -1 is new memory.
        """

    def to_host(self, host: Tensor, tensor: Tensor) -> Copy:
        """Start to copy ``tensor`` into ``host``; both are dense and of the same layout."""

    def to_device(self, tensor: Tensor, host: Tensor) -> Copy:
        """Start to copy ``host`` into ``tensor``; both are dense and of the same layout."""


def backend_for(device: torch.device) -> Backend:
    """The backend that suits ``device``: streams on CUDA, plain copies elsewhere."""
    return CudaBackend(device) if device.type == "cuda" else PlainBackend()


def smallest_worth_moving(device: torch.device, given: int | None = None) -> int:
    """Bytes of the smallest tensor that should leave ``device``: as given, or as suits the device.

    64 KiB on accelerators, so that nothing waits for copies that free next to nothing; 0 on the CPU, where it
    is rehearsed, not needed.
    """
    if given is not None:
        return given
    return 0 if device.type == "cpu" else _MIN_BYTES_ON_ACCELERATORS


class PlainBackend:
    """Copies at once, in the order of the program: for the CPU, and for every device other than CUDA."""

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        if descriptor == -1:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        try:
            return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        except OSError:
            return None

    def to_host(self, host: Tensor, tensor: Tensor) -> Copy:
        host.copy_(tensor)
        return _Done()

    def to_device(self, tensor: Tensor, host: Tensor) -> Copy:
        tensor.copy_(host)
        return _Done()


class _Done:
    """A copy that is complete."""

    def wait(self) -> None:
        """Nothing to wait for."""


class CudaBackend:
    """Copies between a CUDA device and pinned host memory, during the computation.

    Two streams, since devices have a copy engine for each direction. To wait for a copy makes the device
    wait, not the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        return _pinned(num_bytes, descriptor, self._device, self._synchronize)

    def to_host(self, host: Tensor, tensor: Tensor) -> Copy:
        return self._copy(self._out, host, tensor)

    def to_device(self, tensor: Tensor, host: Tensor) -> Copy:
        return self._copy(self._in, tensor, host)

    def _copy(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> Copy:
        compute = torch.cuda.current_stream(self._device)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return _StreamCopy(stream.record_event(), compute)

    def _synchronize(self) -> None:
        self._out.synchronize()
        self._in.synchronize()


class _StreamCopy:
    """A copy on a stream, with the compute stream from whose memory pool its device tensor came.

    That stream waits too, because it is there that the tensor's memory is used next. ``record_stream``
    would instead keep the memory from everybody until the host sees the copy done, so that a device that
    computes faster than it copies would pile it up.
    """

    def __init__(self, event: torch.cuda.Event, compute: torch.cuda.Stream) -> None:
        self._event = event
        self._compute = compute

    def wait(self) -> None:
        self._compute.wait_event(self._event)
        current = torch.cuda.current_stream(self._compute.device)
        if current != self._compute:
            current.wait_event(self._event)


class _PinnedPages(mmap.mmap):
    """Pages that the device copies from and to directly.

    Shared pages, also of memory without a file: those of a private mapping could be replaced in this process
    by a copy when it writes to them after a fork, and the device would continue with the old ones.
    """

    release: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()


def _pinned(
    num_bytes: int, descriptor: int, device: torch.device, synchronize: Callable[[], None]
) -> Tensor | None:
    """Pinned memory of exactly ``num_bytes``, whole pages, of a file or new; None when the system refuses.

    ``torch.empty(pin_memory=True)`` would round up to a power of two, and keep what is freed.
    """
    try:
        pages = _PinnedPages(descriptor, num_bytes)
    except OSError:
        return None
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    runtime, address = torch.cuda.cudart(), buffer.data_ptr()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        error = runtime.cudaHostRegister(address, num_bytes, 0)
    if error != runtime.cudaError.success:
        logger.warning("Host memory could not be pinned: %s.", runtime.cudaGetErrorString(error))
        with contextlib.suppress(RuntimeError):  # else the next kernel would report the error as its own
            torch.zeros(1, device=device).add_(1)
        return None

    def release() -> None:
        # The device may still be copying what nobody wants any more.
        synchronize()
        # On any thread: where none was chosen, the first device would be opened, too.
        with torch.cuda.device(device):
            runtime.cudaHostUnregister(address)

    pages.release = release
    return buffer
