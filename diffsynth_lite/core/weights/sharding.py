"""This file shards frozen weights over processes: each keeps some rows of every weight, not all of them.

torch's ``fully_shard`` has them meet: the weights of a block are whole on each device from its call on until
the call is over, in forward, recompute and backward. Frozen weights have no gradients to exchange, and what
trains is put on a model after it was sharded, so that it is whole everywhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from diffsynth_lite.core.gradient import blocks_in
from diffsynth_lite.core.gradient.arguments import put_tensors, take_tensors
from diffsynth_lite.core.parallel import JointPasses
from diffsynth_lite.core.units import format_bytes


class BaseShards(JointPasses):
    """Shards models over the processes of a group, which all of them do alike.

    Args:
        group: of the processes; each keeps about the same number of bytes.
        block_lists: where a model holds its blocks, as of ``blocks_in``; no block holds another one. The
            weights of each are gathered together, and those outside of blocks are, too.
    """

    def __init__(
        self, group: torch.distributed.ProcessGroup, device: torch.device, block_lists: Sequence[str]
    ) -> None:
        super().__init__(group, device)
        self.num_shards, self._block_lists = group.size(), tuple(block_lists)

    def apply_to(self, model: nn.Module) -> None:
        """Shard a frozen model on the meta device; its parameters are empty shards afterwards."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(self._group, self.device.type)
        # A scalar has no rows.
        ignored = {parameter for parameter in model.parameters() if not parameter.ndim}
        for module in (*blocks_in(model, self._block_lists), model):
            module.register_forward_hook(_without_views)
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=ignored)
        self.watch(model)


def _without_views(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """What a module returns, without views: where one is changed in place, torch's hook on it is lost.

    The weights would then be missing in backward.
    """
    tensors, template = take_tensors(output)
    if not torch.is_grad_enabled() or not any(tensor._is_view() for tensor in tensors):
        return output
    return put_tensors(template, [tensor.clone() if tensor._is_view() else tensor for tensor in tensors])


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a shard of a larger one, as which it shows itself."""
    # To import its class takes time in which nothing may be sharded at all.
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Any) -> Tensor:
    """What of a tensor is in the memory of this process: all of one that is not sharded."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return part


def whole(tensor: Any) -> Tensor:
    """All of a tensor; of a sharded one all processes of its group call this together."""
    gathered: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return gathered


def own_rows(tensor: Any) -> range:
    """The rows of a tensor, of those of all processes, that ``local_part`` holds; one without dimensions has
    one.

    As ``torch.chunk`` cuts them: as many for each process, and fewer or none for the last ones.
    """
    num_rows = len(tensor) if tensor.ndim else 1
    if not is_sharded(tensor):
        return range(num_rows)
    size = -(-num_rows // tensor.device_mesh.size())
    first = min(size * tensor.device_mesh.get_local_rank(), num_rows)
    return range(first, min(first + size, num_rows))


@dataclass(frozen=True, kw_only=True)
class ShardReport:
    """What a process keeps of the frozen weights of a model; nothing is sharded where it keeps all."""

    num_shards: int
    num_bytes: int
    whole_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """What is in the memory of this process, also of a model with adapters."""
        frozen: list[Any] = [one for one in model.parameters() if not one.requires_grad]
        return cls(
            num_shards=max([1, *(one.device_mesh.size() for one in frozen if is_sharded(one))]),
            num_bytes=local_bytes(frozen),
            whole_bytes=sum(parameter.nbytes for parameter in frozen),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are shared at all."""
        return self.num_shards > 1

    def lines(self) -> list[str]:
        """The report for people, in the form of the gradient engine's: at most one line."""
        if not self.is_sharded:
            return []
        sizes = f"{format_bytes(self.num_bytes)} here of {format_bytes(self.whole_bytes)} of frozen weights"
        return [f"{'sharded':<15} {sizes}, over {self.num_shards} processes"]

    def metrics(self) -> dict[str, float]:
        """Each number by its name; none where nothing is sharded."""
        if not self.is_sharded:
            return {}
        return {
            "weight_shards": self.num_shards,
            "weight_bytes_of_process": self.num_bytes,
            "weight_bytes_of_all_shards": self.whole_bytes,
        }


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take in this process."""
    return sum(local_part(tensor).nbytes for tensor in tensors)
