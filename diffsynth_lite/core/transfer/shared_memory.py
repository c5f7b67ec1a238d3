"""This file lets the processes of one machine map the same host memory: what all need is there once."""

import os
import platform
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from diffsynth_lite.core.transfer.backends import Backend
from diffsynth_lite.core.units import format_bytes

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESS_NUMBERS = Path("/proc/self/ns/pid")

Gather = Callable[[Any], Sequence[Any]]
"""Hands what each process gives to all of them, in the same order to each; all of them call it together."""


class HostMemoryError(ValueError):
    """The system has too little host memory."""


class HostMemory:
    """Host memory for what all processes of a machine need alike: one copy that they map, or a copy each.

    Args:
        backend: whose copies are fast from it.
        shared: uint8, the one copy; None lets each process have its own.
        is_filled_elsewhere: whether another process writes ``shared``, and this one only reads.
    """

    def __init__(
        self,
        backend: Backend,
        shared: Tensor | None = None,
        *,
        is_filled_elsewhere: bool = False,
        num_processes: int = 1,
    ) -> None:
        self.backend, self.is_filled_elsewhere = backend, is_filled_elsewhere
        self.num_processes = num_processes
        self._shared, self._num_taken = shared, 0

    @classmethod
    def of_machine(cls, num_bytes: int, contents: object, backend: Backend, gather: Gather) -> Self:
        """Memory that the processes of a machine share, where all of them will have the same in it.

        It is a file without a name: the system frees it with the last process that maps it, whichever that
        is and however it ends. Where the system does not let all of them map it, or where what they will have
        in it differs, each has a copy of its own.

        Args:
            gather: among all processes, also of other machines.
        """
        own = _Wish(machine=_machine(), reach=_reach(), num_bytes=num_bytes, contents=contents)
        wishes: Sequence[_Wish] = gather(own)
        local_ranks = [rank for rank, wish in enumerate(wishes) if wish.machine == own.machine]
        first = wishes[local_ranks[0]]
        can_share = len(local_ranks) > 1 and all(wishes[rank].can_share_with(first) for rank in local_ranks)
        is_first = first.name == own.name

        made = _MemoryFile.made(num_bytes) if can_share and is_first else None
        offered: _MemoryFile | None = gather(made)[local_ranks[0]]
        shared = None if offered is None else offered.mapped(backend, num_bytes)
        # The others have opened it, or never will.
        have_mapped = gather(shared is not None)
        if made is not None:
            os.close(made.descriptor)
        if not all(have_mapped[rank] for rank in local_ranks):
            return cls(backend, num_processes=len(local_ranks))
        return cls(backend, shared, is_filled_elsewhere=not is_first, num_processes=len(local_ranks))

    @property
    def is_shared(self) -> bool:
        """Whether there is one copy for all processes of this machine."""
        return self._shared is not None

    @property
    def num_copies(self) -> int:
        """How many copies this machine holds; of what was not taken here each process has its own."""
        return 1 if self.is_shared and self._num_taken else self.num_processes

    def take(self, num_bytes: int) -> Tensor:
        """The next piece, uint8; all processes take pieces of the same sizes in the same order.

        Args:
            num_bytes: such that the next piece is aligned as it should be.

        Raises:
            HostMemoryError: the system refuses.
        """
        if self._shared is None:
            piece = self.backend.allocate_host(num_bytes)
        else:
            piece = self._shared[self._num_taken : self._num_taken + num_bytes]
            assert len(piece) == num_bytes, "more is taken than was asked for"
        if piece is None:
            raise HostMemoryError(
                f"the system refused {format_bytes(num_bytes)} of host memory for one block"
            )
        self._num_taken += num_bytes
        return piece


@dataclass(frozen=True, kw_only=True)
class _Wish:
    """What one process asks of the others."""

    machine: str
    reach: tuple[int, int] | None
    num_bytes: int
    contents: object
    name: uuid.UUID = field(default_factory=uuid.uuid4)

    def can_share_with(self, other: "_Wish") -> bool:
        """Whether this process can open what the other one makes, and would have the same in it."""
        return self.reach is not None and replace(self, name=other.name) == other


@dataclass(frozen=True)
class _MemoryFile:
    """Memory that other processes open as a file of the one that made it."""

    process: int
    descriptor: int
    identity: tuple[int, int]

    @classmethod
    def made(cls, num_bytes: int) -> Self | None:
        """One of so many bytes, which the system gives at once; None where it does not."""
        try:
            descriptor = os.memfd_create("streamed-weights")
        except OSError:
            return None
        try:
            # Else a lack of memory would end the process that writes to it.
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError:
            os.close(descriptor)
            return None
        return cls(os.getpid(), descriptor, _identity(descriptor))

    def mapped(self, backend: Backend, num_bytes: int) -> Tensor | None:
        """All of it, in this process; None where the system does not allow that, or the maker has ended."""
        try:
            descriptor = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            # Of a maker that has ended, the number may be another process's by now.
            is_same = _identity(descriptor) == self.identity
            return backend.allocate_host(num_bytes, descriptor) if is_same else None
        finally:
            os.close(descriptor)


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _machine() -> str:
    """Identity of this machine; containers of one machine have the same."""
    return _BOOT_ID.read_text() if _BOOT_ID.exists() else platform.node()


def _reach() -> tuple[int, int] | None:
    """Processes of which this is equal open each other's files; None where the system has no such thing."""
    if not hasattr(os, "memfd_create") or not _PROCESS_NUMBERS.exists():
        return None
    return _PROCESS_NUMBERS.stat().st_ino, os.geteuid()
