"""One copy for the processes of a machine: who shares it, who fills it, and what becomes of it at an end."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from diffsynth_lite.core.transfer import shared_memory
from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.core.transfer.shared_memory import Gather, HostMemory, HostMemoryError, _MemoryFile

NUM_BYTES = 3 * 4096
OF_THREAD = threading.local()
shares = pytest.mark.skipif(shared_memory._reach() is None, reason="this system shares no memory")


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class MapsNothing(PlainBackend):
    """On a system that pins nothing but new memory."""

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        return super().allocate_host(num_bytes) if descriptor == -1 else None


class Refuses(PlainBackend):
    """On a system without memory."""

    def allocate_host(self, num_bytes: int, descriptor: int = -1) -> Tensor | None:
        return None


def gathers(num_processes: int) -> Callable[[int], Gather]:
    """What hands values round among threads that stand for processes, by the number of each."""
    barrier, values = threading.Barrier(num_processes), [None] * num_processes

    def gather_of(rank: int) -> Gather:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        return gather

    return gather_of


def memories(
    *contents: object, backends: tuple[type[PlainBackend], ...] = (), machines: str = "aaaa"
) -> list[HostMemory]:
    """That of each process, by what it will have in it; one machine has one letter."""
    gather_of = gathers(len(contents))
    kinds = backends or (PlainBackend,) * len(contents)

    def make(rank: int) -> HostMemory:
        OF_THREAD.machine = machines[rank]
        return HostMemory.of_machine(NUM_BYTES, contents[rank], kinds[rank](), gather_of(rank))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(contents)) as pool:
        patch.setattr(shared_memory, "_machine", lambda: OF_THREAD.machine)
        return list(pool.map(make, range(len(contents))))


@shares
def test_processes_of_a_machine_share_one_copy_which_the_first_of_them_fills() -> None:
    before = num_open_files()
    first, *others = memories("same", "same", "same")
    assert [memory.is_filled_elsewhere for memory in (first, *others)] == [False, True, True]
    assert first.num_copies == 3  # nothing was taken yet
    pieces = [[memory.take(size) for size in (512, 8192)] for memory in (first, *others)]
    assert {(memory.num_copies, memory.num_processes) for memory in (first, *others)} == {(1, 3)}
    pieces[0][0].fill_(5)
    pieces[0][1].fill_(6)
    for small, large in pieces[1:]:
        assert small.eq(5).all()
        assert large.eq(6).all()
        assert large.data_ptr() == small.data_ptr() + 512
    del pieces, small, large, first, others
    assert num_open_files() == before


@shares
def test_each_machine_has_a_copy_of_its_own() -> None:
    found = memories("same", "same", "same", "same", machines="abab")
    assert [memory.is_filled_elsewhere for memory in found] == [False, False, True, True]
    pieces = [memory.take(512) for memory in found]
    pieces[0].fill_(5)
    pieces[1].fill_(6)
    assert [int(piece[0]) for piece in pieces] == [5, 6, 5, 6]
    assert {(memory.num_copies, memory.num_processes) for memory in found} == {(1, 2)}


def refuse(*_arguments: object) -> int:
    raise OSError("not permitted")


@pytest.mark.parametrize(
    "reason", ["other contents", "one cannot map it", "no such system", "not permitted", "no memory"]
)
def test_where_they_cannot_share_each_process_has_a_copy(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "no such system":
        monkeypatch.setattr(shared_memory, "_reach", lambda: None)
    if reason == "not permitted":
        monkeypatch.setattr("os.memfd_create", refuse, raising=False)
    if reason == "no memory":
        monkeypatch.setattr("os.posix_fallocate", refuse, raising=False)
    before = num_open_files()
    found = memories(
        *("same", "other" if reason == "other contents" else "same"),
        backends=(PlainBackend, MapsNothing if reason == "one cannot map it" else PlainBackend),
    )
    pieces = [memory.take(512) for memory in found]
    pieces[0].fill_(5)
    pieces[1].fill_(6)
    assert [int(piece[0]) for piece in pieces] == [5, 6]
    assert {(memory.num_copies, memory.num_processes) for memory in found} == {(2, 2)}
    assert not any(memory.is_filled_elsewhere for memory in found)
    assert num_open_files() == before


def test_a_process_alone_takes_new_memory_and_a_lack_of_it_is_an_error() -> None:
    (alone,) = memories("anything")
    assert (alone.take(512).nbytes, alone.num_copies, alone.num_processes) == (512, 1, 1)
    (alone,) = memories("anything", backends=(Refuses,))
    with pytest.raises(HostMemoryError, match=r"refused 4\.0 KiB of host memory"):
        alone.take(4096)


MAKER = f"""
import os
descriptor = os.memfd_create("made")
os.write(descriptor, bytes([5]) * {NUM_BYTES})
status = os.fstat(descriptor)
print(os.getpid(), descriptor, status.st_dev, status.st_ino, flush=True)
input()
"""


@shares
def test_what_is_mapped_outlives_the_process_that_made_it_and_is_not_taken_for_another_file() -> None:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdin=-1, stdout=-1, text=True) as maker:
        assert maker.stdout is not None
        process, descriptor, *identity = map(int, maker.stdout.readline().split())
        made = _MemoryFile(process, descriptor, (identity[0], identity[1]))
        mapped = made.mapped(PlainBackend(), NUM_BYTES)
        another = _MemoryFile(process, descriptor, (identity[0], identity[1] + 1))
        assert another.mapped(PlainBackend(), NUM_BYTES) is None
        maker.kill()
    assert made.mapped(PlainBackend(), NUM_BYTES) is None
    assert mapped is not None
    assert mapped.eq(5).all()
