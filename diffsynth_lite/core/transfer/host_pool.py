"""This file lends pieces of host memory, and finds out how much host memory is available."""

import bisect
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def default_host_bytes() -> int | None:
    """Half of the available host memory, divided by the processes that share it; None where it is unknown."""
    available = available_host_bytes()
    return None if available is None else available // 2 // num_local_processes()


def num_local_processes() -> int:
    """Processes of the run on this machine: one for each of its devices, or all where it has none.

    A process does not know how many others run.
    """
    num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return min(num_processes, torch.cuda.device_count() or num_processes)


def available_host_bytes(meminfo: Path = _MEMINFO, control_group: Path = _CONTROL_GROUP) -> int | None:
    """Bytes of host memory that this process can still use; None where the system does not report it.

    Args:
        control_group: folder with the limits of the container (control groups version 2).
    """
    limits = [_of_the_machine(meminfo), _of_the_container(control_group)]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_the_machine(meminfo: Path) -> int | None:
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_the_container(control_group: Path) -> int | None:
    limit, used = control_group / "memory.max", control_group / "memory.current"
    if not limit.exists() or not used.exists():
        return None
    value = limit.read_text().strip()
    return None if value == "max" else max(int(value) - int(used.read_text()), 0)


_ALIGNMENT = 512
"""Bytes; every dtype can be viewed at such an offset, and copy engines like it."""
_PAGE = 4096
_SLAB_BYTES = 256 * 1024**2
"""Slabs grow up to this size. Larger tensors get a slab of their own, so that nothing is rounded up much:
torch's own pinned allocator takes the next power of two, 512 MiB for 335 MB."""

AllocateHost = Callable[[int], Tensor | None]
"""Makes a one-dimensional uint8 tensor of so many bytes in host memory, or None when the system refuses."""


class HostBytesError(ValueError):
    """The ``host_bytes`` allowed do not hold the ``block_bytes`` that one block call offloads."""

    def __init__(self, host_bytes: int, block_bytes: int) -> None:
        super().__init__(
            f"host_bytes is {host_bytes}, and one block call offloads {block_bytes} bytes; allow at least "
            "these, or offload nothing"
        )
        self.host_bytes, self.block_bytes = host_bytes, block_bytes


class HostPiece:
    """A piece of host memory; it goes back to the pool when this object is deleted.

    Attributes:
        buffer: uint8, of exactly the bytes asked for.
    """

    def __init__(self, buffer: Tensor, give_back: Callable[[], None]) -> None:
        self.buffer = buffer
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back()


class HostPool:
    """Host memory for offloaded tensors, up to a cap.

    A piece must not be deleted before its copies were waited for: its memory may be lent again at once.

    Args:
        cap_bytes: most memory that the slabs may take together; None is unlimited.
    """

    def __init__(self, cap_bytes: int | None) -> None:
        self.cap_bytes = cap_bytes
        self._refused = False
        self._slabs: list[_Slab] = []
        # Pieces are deleted by the garbage collector, on any thread and inside of any other call, so that
        # they must not take the lock. Appending to a deque is atomic.
        self._returned: deque[tuple[_Slab, int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        with self._lock:
            return self._num_bytes()

    @property
    def num_bytes_lent(self) -> int:
        """Bytes of the pieces that are in use, each rounded up to 512."""
        with self._lock:
            self._collect()
            return self._num_bytes() - sum(slab.num_bytes_free for slab in self._slabs)

    @property
    def refused(self) -> bool:
        """Whether the system refused a slab before the cap was reached; none was asked for since."""
        return self._refused

    def take(self, num_bytes: int, allocate: AllocateHost) -> HostPiece | None:
        """A piece of ``num_bytes``, or None when the cap or the system forbids one.

        Args:
            allocate: makes a slab if one is needed. Only slabs made by an equal ``allocate`` are used.
        """
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._collect()
            fitting = [slab for slab in self._slabs if slab.allocate == allocate and slab.largest >= size]
            slab = min(fitting, key=lambda slab: slab.largest) if fitting else self._new_slab(size, allocate)
            if slab is None:
                return None
            start = slab.take(size)
        returned = self._returned
        return HostPiece(
            slab.buffer[start : start + num_bytes], lambda: returned.append((slab, start, start + size))
        )

    def _new_slab(self, size: int, allocate: AllocateHost) -> "_Slab | None":
        """A slab with at least ``size`` bytes; as large as all others together while that is moderate."""
        if self._refused:
            return None
        needed = -(-size // _PAGE) * _PAGE
        if self.cap_bytes is not None and self._num_bytes() + needed > self.cap_bytes:
            # Slabs that are free as a whole are left over from a step with other sizes.
            self._slabs = [slab for slab in self._slabs if slab.num_bytes_free < slab.num_bytes]
        wanted = max(needed, min(self._num_bytes(), _SLAB_BYTES))
        if self.cap_bytes is not None:
            room = (self.cap_bytes - self._num_bytes()) // _PAGE * _PAGE
            if room < needed:
                return None
            wanted = min(wanted, room)
        buffer = allocate(wanted)
        if buffer is None:
            self._refused = True
            return None
        self._slabs.append(_Slab(buffer, allocate))
        return self._slabs[-1]

    def _num_bytes(self) -> int:
        return sum(slab.num_bytes for slab in self._slabs)

    def _collect(self) -> None:
        while self._returned:
            slab, start, end = self._returned.popleft()
            slab.put(start, end)


class _Slab:
    """One allocation, and the ranges of it that are free."""

    def __init__(self, buffer: Tensor, allocate: AllocateHost) -> None:
        self.buffer, self.allocate = buffer, allocate
        self.num_bytes = self.largest = buffer.numel()
        self._free = [(0, self.num_bytes)]  # (start, end), sorted; no two touch

    @property
    def num_bytes_free(self) -> int:
        return sum(end - start for start, end in self._free)

    def take(self, size: int) -> int:
        """Start of ``size`` bytes cut from the smallest free range that has them."""
        start, end = min(
            (span for span in self._free if span[1] - span[0] >= size), key=lambda span: span[1] - span[0]
        )
        index = self._free.index((start, end))
        self._free[index : index + 1] = [(start + size, end)] if start + size < end else []
        self.largest = max((end - start for start, end in self._free), default=0)
        return start

    def put(self, start: int, end: int) -> None:
        """Free a range, joined with its free neighbours."""
        index = bisect.bisect(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))
        self.largest = max(self.largest, end - start)
