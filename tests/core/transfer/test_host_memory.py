"""Host memory that is lent in pieces, and that processes of a machine share."""

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from gradient_models import checkpointed_step, qwen_image
from hypothesis import given, settings
from torch import Tensor

from diffsynth_lite.core.gradient import GradientEngine, gradient_engine
from diffsynth_lite.core.transfer import shared_memory
from diffsynth_lite.core.transfer.backends import PlainBackend
from diffsynth_lite.core.transfer.host_pool import HostPool, available_host_bytes, default_host_bytes
from diffsynth_lite.core.transfer.shared_memory import Gather, HostMemory, HostMemoryError, _MemoryFile

MIB = 1024**2
OFFLOAD = (False, True)


def ordinary(num_bytes: int) -> Tensor | None:
    return torch.empty(num_bytes, dtype=torch.uint8)


def meta(num_bytes: int) -> Tensor | None:
    """A slab of any size that takes no memory."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


@settings(deadline=None, max_examples=50)
@given(st.lists(st.one_of(st.integers(1, 20_000), st.none()), max_size=60))
def test_pieces_do_not_overlap_and_go_back_whole(requests: list[int | None]) -> None:
    pool = HostPool(None)
    pieces: list[Any] = []
    for number, num_bytes in enumerate(requests):
        if num_bytes is None:
            if pieces:
                pieces.pop(number % len(pieces))
            continue
        pieces.append(pool.take(num_bytes, ordinary))
        assert pieces[-1].buffer.nbytes == num_bytes
    for index in range(len(pieces)):
        pieces[index].buffer.fill_(index)
    assert all((piece.buffer == index).all() for index, piece in enumerate(pieces))
    size = pool.num_bytes
    assert pool.num_bytes_lent == sum(-(-piece.buffer.nbytes // 512) * 512 for piece in pieces)
    pieces.clear()
    assert pool.num_bytes_lent == 0
    assert pool.num_bytes == size


def test_a_large_tensor_is_not_rounded_to_a_power_of_two() -> None:
    pool, num_bytes = HostPool(None), 335 * 1000 * 1000
    pieces = [pool.take(num_bytes, meta) for _ in range(10)]
    assert None not in pieces
    assert pool.num_bytes < 10 * (num_bytes + 4096)


def test_slabs_grow_with_use_so_that_a_small_run_takes_little() -> None:
    pool = HostPool(None)
    pieces = [pool.take(1000, meta)]
    assert pool.num_bytes == 4096
    pieces.extend(pool.take(8 * MIB, meta) for _ in range(200))
    lent = pool.num_bytes_lent
    assert lent <= pool.num_bytes <= lent + 256 * MIB


def test_the_cap_holds_and_what_other_sizes_left_makes_room() -> None:
    pool = HostPool(64 * 4096)
    small = [pool.take(4096, meta) for _ in range(64)]
    assert None not in small
    assert pool.num_bytes == 64 * 4096
    assert pool.take(1, meta) is None
    assert not pool.refused
    del small
    large = pool.take(64 * 4096, meta)
    assert large is not None
    assert pool.num_bytes == 64 * 4096
    assert HostPool(4095).take(1, meta) is None


def test_after_a_refusal_the_system_is_not_asked_again() -> None:
    pool = HostPool(None)
    asked: list[int] = []

    def refuse(num_bytes: int) -> Tensor | None:
        asked.append(num_bytes)
        return None

    assert pool.take(1, refuse) is None
    assert pool.take(1, refuse) is None
    assert pool.refused
    assert asked == [4096]


def test_slabs_of_different_kinds_are_not_mixed() -> None:
    pool = HostPool(None)
    pool.take(4096, ordinary)
    piece = pool.take(4096, meta)
    assert piece is not None
    assert piece.buffer.device.type == "meta"


def test_steps_with_changing_batches_use_the_same_host_memory() -> None:
    engine = GradientEngine()
    batches = [qwen_image(batch_size=size) for size in (3, 1, 2)]
    sizes = []
    with gradient_engine(engine):
        for _ in range(3):
            for batch in batches:
                checkpointed_step(batch, OFFLOAD)
            sizes.append(engine.host_pool.num_bytes)
    assert sizes[0] == sizes[1] == sizes[2]
    assert engine.host_pool.num_bytes_lent == 0


def test_available_memory_is_that_of_the_machine_or_of_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  99 kB\nMemAvailable:   7 kB\n")
    assert available_host_bytes(meminfo, tmp_path) == 7 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_host_bytes(meminfo, tmp_path) == 3000
    (tmp_path / "memory.current").write_text("6000\n")
    assert available_host_bytes(meminfo, tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, tmp_path) == 7 * 1024


def test_by_default_at_most_half_of_the_available_memory_is_used() -> None:
    before, cap, after = available_host_bytes(), default_host_bytes(), available_host_bytes()
    if before is None:
        assert cap is None
    else:
        # Other programs take and free memory in between.
        assert 0.2 * min(before, after) <= cap <= 0.8 * max(before, after)


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


def test_a_single_process_takes_new_memory_and_a_lack_of_it_is_an_error() -> None:
    (private,) = memories("anything")
    assert (private.take(512).nbytes, private.num_copies, private.num_processes) == (512, 1, 1)
    (private,) = memories("anything", backends=(Refuses,))
    with pytest.raises(HostMemoryError, match=r"refused 4\.0 KiB of host memory"):
        private.take(4096)


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
