"""This file decides which processes share the frozen base, and checks that sharding has an effect."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator

from diffsynth_lite.config import Config
from diffsynth_lite.core.units import format_bytes
from diffsynth_lite.core.weights.sharding import BaseShards, ShardReport
from diffsynth_lite.errors import UserError
from diffsynth_lite.pipelines import ModelFamily
from diffsynth_lite.training.distributed.agreement import ranks_by_machine

_OLDEST_TORCH = (2, 7)
"""Before, ``fully_shard`` could not leave parameters out."""
_BY_NODE = "memory.shard_base: node"


def check_sharding(config: Config, accelerator: Accelerator) -> None:
    """Check that there are processes to shard the base over; all of them call this together."""
    wanted = config.memory.shard_base
    if wanted == "no":
        return
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise UserError(
            f"memory.shard_base: {wanted} needs torch {oldest} or later, and {torch.__version__} is "
            "installed; update it, or set no"
        )
    if accelerator.num_processes == 1:
        raise UserError(
            f"memory.shard_base: {wanted} shards the base over the processes of a run, and this is the only "
            "one; start one for each device (torchrun --standalone --nproc_per_node 8 train.py ...), or set "
            "no"
        )
    machines = ranks_by_machine(accelerator, key=_BY_NODE) if wanted == "node" else []
    if any(len(ranks) == 1 for ranks in machines):
        raise UserError(
            "memory.shard_base: node shards the base over the processes of each machine, and one of them "
            "has a single one; set all, or no"
        )


def shards_of(config: Config, family: ModelFamily, accelerator: Accelerator) -> BaseShards | None:
    """Shards for a family's denoising models, called on all processes; None where each keeps whole models."""
    if config.memory.shard_base == "no":
        return None
    group = torch.distributed.group.WORLD
    if config.memory.shard_base == "node":
        # As Watchdog sets it for the group of all processes.
        limit = timedelta(minutes=config.train.step_timeout_minutes)
        ranks = [list(machine) for machine in ranks_by_machine(accelerator, key=_BY_NODE)]
        by_enumeration: Any = torch.distributed.new_subgroups_by_enumeration  # torch has no types for it
        group, _ = by_enumeration(ranks, timeout=limit)
    assert group is not None
    return BaseShards(group, accelerator.device, family.block_lists)


def require_same_expert(config: Config, family: ModelFamily, shifts: Iterable[float]) -> None:
    """Check that all processes run the same expert in a step, for samples of any sizes.

    They gather each block together, and would take each other's weights for their own.
    """
    if family.shards is not None and len(family.noise_ranges) > 1 and len(set(shifts)) > 1:
        raise UserError(
            f"memory.shard_base: {config.memory.shard_base}, but with objective.shift: "
            f"{config.objective.shift} the expert of a step depends on the size of the sample, and processes "
            "that share the base must run the same one; set objective.shift: static, one expert in "
            "lora.components, or shard_base: no"
        )


def require_as_many_passes(config: Config, family: ModelFamily) -> None:
    """Check that all processes run the model equally often, for any samples.

    They gather each block together, and one that runs it once more would wait for ever.
    """
    train = config.train
    takes_one = train.micro_batch_size == 1 and train.micro_batch_tokens is None
    if family.shards is not None and family.splits_batches and not takes_one:
        raise UserError(
            f"memory.shard_base: {config.memory.shard_base}, but {config.model.family} runs its model "
            "several times for some micro-batches, and processes that share the base must run it as often as "
            "each other; set train.micro_batch_size: 1 without micro_batch_tokens, or shard_base: no"
        )


def require_sharded(config: Config, family: ModelFamily, transformer: torch.nn.Module) -> None:
    """Check that a model that was loaded is sharded where that is asked for."""
    report = ShardReport.of(transformer)
    if family.shards is not None and not report.is_sharded:
        raise UserError(
            f"memory.shard_base: {config.memory.shard_base} has no effect, as {config.model.family} loads "
            f"its model in a way of its own: each process holds all {format_bytes(report.whole_bytes)}; set "
            "it to no"
        )
