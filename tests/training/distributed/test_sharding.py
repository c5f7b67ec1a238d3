"""Processes exchange gradients as DDP does, hold their rows of the base only, and fail together."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from processes import NUM_RANKS, on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diffsynth_lite.config import Config, load_config
from diffsynth_lite.core.parallel import FailedWithinPassError, PeerFailedError, SequenceSplit
from diffsynth_lite.core.weights.formats import Int8
from diffsynth_lite.core.weights.frozen_linear import Quantization, weight_norm
from diffsynth_lite.core.weights.loading import StoredTensors, load_frozen
from diffsynth_lite.core.weights.sharding import BaseShards, ShardReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.training.distributed import agreement, sharding
from diffsynth_lite.training.distributed.agreement import ranks_by_machine
from diffsynth_lite.training.distributed.context import context_of
from diffsynth_lite.training.distributed.devices import mean_gradients
from diffsynth_lite.training.distributed.sharding import (
    check_sharding,
    require_as_many_passes,
    require_same_expert,
)

CPU = torch.device("cpu")
WIDTH = 9  # as all widths here not a multiple of the number of processes


class Base(nn.Module):
    """Blocks of odd sizes, with a number that has no rows; the first result is a view, which is changed."""

    gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).sin() * self.factor
        return self.last(x)[:, 0]


def stored() -> StoredTensors:
    torch.manual_seed(0)
    return StoredTensors(tensors={name: value.clone() for name, value in Base().state_dict().items()})


def loaded(shards: BaseShards | None, quantization: Quantization | None) -> nn.Module:
    with torch.device("meta"):
        model = Base()
    if quantization is not None:
        quantization.apply_to(model)
    load_frozen(model, stored(), device=CPU, shards=shards)
    return model


def values_and_gradients(model: nn.Module) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).requires_grad_()
    y = model(x)
    y *= 2
    y.square().sum().backward()
    return y.detach(), x.grad


def check_base(group: Any, quantization: Quantization | None) -> dict[str, Any]:
    """What a sharded base computes, holds and has read, next to a whole one."""
    read: list[int] = []
    numbers = StoredTensors.numbers

    def watched(self: StoredTensors, name: str, rows: slice) -> Tensor:
        found = numbers(self, name, rows)
        read.append(found.numel())
        return found

    whole = loaded(None, quantization)
    StoredTensors.numbers = watched
    model = loaded(BaseShards(group, CPU, ("blocks",)), quantization)
    StoredTensors.numbers = numbers
    pairs = zip(values_and_gradients(whole), values_and_gradients(model), strict=True)
    return {
        "equal": [torch.equal(*pair) for pair in pairs],
        "norms": torch.equal(*(weight_norm(one.blocks[1], CPU) for one in (whole, model))),
        "report": dataclasses.astuple(ShardReport.of(model)),
        "whole": ShardReport.of(whole).lines(),
        "read": sum(read),
    }


def exchanged(rank: int) -> dict[str, bool]:
    """Gradients of DDP, and of ``mean_gradients``; one layer runs nowhere, one on one process only."""
    found = []
    names = ("used", "sometimes")[: rank + 1]
    for wraps in (True, False):
        torch.manual_seed(0)
        sizes = {"used": (WIDTH, 5), "sometimes": (5, 5), "unused": (2, 2)}
        model = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
        parameters = list(model.parameters())
        used = nn.Sequential(*(model[name] for name in names))
        model.forward = used.forward
        called = DistributedDataParallel(model, find_unused_parameters=True) if wraps else model
        (called(torch.randn(7, WIDTH) * (rank + 1)) ** 2).sum().backward()
        if not wraps:
            mean_gradients(parameters, SimpleNamespace(num_processes=NUM_RANKS))
        found.append([parameter.grad for parameter in parameters])
    same = [torch.equal(*pair) for pair in zip(*(gradients[:4] for gradients in found), strict=True)]
    return {"equal": all(same), "separate": [one is None for one in found[1][4:]] == [True, True]}


def failures(rank: int, group: Any) -> dict[str, str]:
    """Names of the errors that a process gets where one fails, and whether the next pass works."""
    shards = BaseShards(group, CPU, ("blocks",))
    with torch.device("meta"):
        model = Base()
    load_frozen(model, stored(), device=CPU, shards=shards)
    found = {}

    def attempt(name: str, work: Callable[[], object]) -> None:
        found[name] = "none"
        try:
            with torch.no_grad(), shards.failing_together():
                work()
        except (ValueError, RuntimeError) as error:
            found[name] = type(error).__name__

    def one_fails_after(num_passes: int) -> None:
        for place in range(3):
            if rank == 1 and place == num_passes:
                raise ValueError("of the first process")
            model(torch.ones(1, WIDTH))

    attempt("between", lambda: one_fails_after(1))
    attempt("after the last", lambda: [one_fails_after(9), raised() if rank else None])
    attempt("nowhere", lambda: one_fails_after(9))
    # On all, as nobody could inform the others.
    attempt("within", lambda: model(torch.ones(1, 1)))
    return found


def raised() -> None:
    raise ValueError("at the end")


def work_on_a_rank(rank: int, folder: Path) -> None:
    group = torch.distributed.group.WORLD
    int8 = Quantization(format=Int8(), layers=("blocks.0", "blocks.1"), device=CPU)
    found = {
        "plain": check_base(group, None),
        "int8": check_base(group, int8),
        "exchanged": exchanged(rank),
        "failures": failures(rank, group),
    }
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(work_on_a_rank, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_a_sharded_base_computes_as_a_whole_one_and_reads_only_its_own_rows(
    results: list[dict[str, Any]], kind: str
) -> None:
    bases = [result[kind] for result in results]
    for found in bases:
        assert found["equal"] == [True, True]
        assert found["norms"]
        assert found["whole"] == []
    num_numbers = sum(parameter.numel() for parameter in Base().parameters())
    assert sum(found["read"] for found in bases) == num_numbers + 1  # the number without rows is everywhere
    shares = [found["report"] for found in bases]
    assert {(num_shards, num_bytes) for num_shards, _, num_bytes in shares} == {(2, shares[0][2])}
    # Rows are whole: 5 and 4 of 9, 1 and 0 of 1; a number without rows is on both.
    assert sum(num_bytes for _, num_bytes, _ in shares) == shares[0][2] + 4
    assert all(0.4 < num_bytes / whole < 0.6 for _, num_bytes, whole in shares)


def test_gradients_are_the_means_that_ddp_gives_bit_for_bit(results: list[dict[str, Any]]) -> None:
    assert [result["exchanged"] for result in results] == [{"equal": True, "separate": True}] * NUM_RANKS


def test_where_one_process_fails_between_passes_all_fail_and_go_on_together(
    results: list[dict[str, Any]],
) -> None:
    fails = ("PeerFailedError", "ValueError")
    within = FailedWithinPassError.__name__
    for result, failed in zip(results, fails, strict=True):
        expected = {"between": failed, "after the last": failed, "nowhere": "none", "within": within}
        assert result["failures"] == expected


def share_by_machine(rank: int, folder: Path) -> None:
    """Of four processes on two machines."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4"}
    # They have met before; accelerate insists on knowing where.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}
    accelerator = Accelerator(cpu=True)
    config = SimpleNamespace(
        memory=SimpleNamespace(shard_base="node"),
        train=SimpleNamespace(step_timeout_minutes=1.0, context_parallel=2, context_parallel_kind="ulysses"),
    )
    family = SimpleNamespace(block_lists=("blocks",), sequence_split=SequenceSplit())
    shards = sharding.shards_of(config, family, accelerator)
    model, whole = loaded(shards, None), loaded(None, None)
    pairs = zip(values_and_gradients(whole), values_and_gradients(model), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    report = ShardReport.of(model)
    torch.save((report.num_shards, report.num_bytes, report.whole_bytes), folder / f"{rank}.pt")
    share_samples(rank, config, family, accelerator)


def share_samples(rank: int, config: Any, family: Any, accelerator: Accelerator) -> None:
    """Neighbours have parts of the same gradients, which are added up; the mean is over two samples."""
    shared = context_of(config, family, accelerator)
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([10.0 ** (rank // 2) * (1 + rank % 2)])
    mean_gradients([parameter], accelerator, context_parallel=shared.num_processes)
    assert parameter.grad.item() == (1 + 2 + 10 + 20) / 2
    # Where two neighbours fail the others continue.
    try:
        with shared.failing_together():
            assert rank > 1
    except (AssertionError, PeerFailedError):
        assert rank < 2


def test_each_machine_holds_one_base(tmp_path: Path) -> None:
    on_ranks(share_by_machine, tmp_path, num_ranks=4)
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    assert [num_shards for num_shards, _, _ in shares] == [2] * 4
    assert shares[:2] == shares[2:]
    assert sum(num_bytes for _, num_bytes, _ in shares[:2]) == shares[0][2] + 4


def config_with(*settings: str) -> Config:
    return load_config("qwen_lora.yaml", ["data.path=pictures", *settings]).config


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of the processes in their machines, as they inform each other."""
    local: list[int] = []
    monkeypatch.setattr(agreement, "on_all_processes", lambda _accelerator, _work: local)
    return local


@pytest.mark.parametrize(
    ("local", "machines"),
    [
        ([0, 1, 2], [range(3)]),
        ([0, 1, 0, 1], [range(2), range(2, 4)]),
        ([0, 0, 1], [range(1), range(1, 3)]),
        ([0, 0, 1, 1], None),
        ([1, 0], None),
    ],
)
def test_machines_are_distinguished_where_their_processes_are_numbered_one_after_the_other(
    places: list[int], local: list[int], machines: list[range] | None
) -> None:
    places += local
    process, key = SimpleNamespace(local_process_index=0), "memory.shard_base: node"
    if machines is None:
        with pytest.raises(UserError, match=r"memory\.shard_base: node needs processes that are numbered"):
            ranks_by_machine(process, key=key)
    else:
        assert ranks_by_machine(process, key=key) == machines


def test_what_sharding_could_not_do_is_refused_with_what_would_do(
    places: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = SimpleNamespace(num_processes=1), SimpleNamespace(num_processes=2, local_process_index=0)
    check_sharding(config_with(), one)
    with pytest.raises(
        UserError, match=r"memory\.shard_base: all .* this is the only one; start one for each"
    ):
        check_sharding(config_with("memory.shard_base=all"), one)
    check_sharding(config_with("memory.shard_base=all"), two)
    places += [0, 0, 1]
    with pytest.raises(UserError, match=r"memory\.shard_base: node .* has a single one; set all, or no"):
        check_sharding(config_with("memory.shard_base=node"), two)
    monkeypatch.setattr(torch, "__version__", "2.6.1+cu124")
    with pytest.raises(UserError, match=r"memory\.shard_base: all needs torch 2\.7 or later, and 2\.6\.1"):
        check_sharding(config_with("memory.shard_base=all"), two)
    for setting in ("memory.stream_blocks=all", "memory.stream_blocks=auto", "train.compile=blocks"):
        with pytest.raises(UserError, match=r"memory\.shard_base"):
            config_with("memory.shard_base=node", setting)


def test_what_is_sharded_runs_as_often_in_each_process() -> None:
    splitting: Any = SimpleNamespace(shards=object(), splits_batches=True)
    whole: Any = SimpleNamespace(shards=None, splits_batches=True)
    other: Any = SimpleNamespace(shards=object(), splits_batches=False)
    one = ("memory.shard_base=all", "train.micro_batch_size=1")
    two = ("memory.shard_base=all", "train.micro_batch_size=2", "train.global_batch_size=4")
    require_as_many_passes(config_with(*one), splitting)
    for family in (whole, other):
        require_as_many_passes(config_with(*two), family)
    for settings in (two, (*one, "train.micro_batch_tokens=4096")):
        with pytest.raises(UserError, match=r"shard_base: all, .* set train\.micro_batch_size: 1 without"):
            require_as_many_passes(config_with(*settings), splitting)


def test_experts_that_are_chosen_by_size_are_not_sharded() -> None:
    config = config_with("memory.shard_base=all")
    sharded: Any = SimpleNamespace(shards=object(), noise_ranges=[(0.5, 1.0), (0.0, 0.5)])
    whole = SimpleNamespace(shards=None, noise_ranges=sharded.noise_ranges)
    one_model = SimpleNamespace(shards=object(), noise_ranges=[(0.0, 1.0)])
    for family, shifts in ((sharded, [3.0, 3.0]), (whole, [3.0, 5.0]), (one_model, [3.0, 5.0])):
        require_same_expert(config, family, shifts)
    with pytest.raises(UserError, match=r"memory\.shard_base: all.*lora\.components"):
        require_same_expert(config, sharded, [3.0, 5.0])
