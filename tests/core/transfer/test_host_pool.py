"""Host memory is cut to the byte, used again from step to step, and never more than allowed."""

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
from gradient_models import checkpointed_step, qwen_image
from hypothesis import given, settings
from torch import Tensor

from diffsynth_lite.core.gradient import GradientEngine, gradient_engine
from diffsynth_lite.core.transfer.host_pool import HostPool, available_host_bytes, default_host_bytes

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
