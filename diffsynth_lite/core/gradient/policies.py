"""This file chooses which blocks of a model are kept, recomputed or offloaded, and which save attention."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

CheckpointFunction = Callable[..., Any]
"""``checkpoint(run, *tensors)``: calls ``run(*tensors)``, once more in backward, and returns its outputs."""

SaveAttention = Literal["no", "keep", "park"]
Selection = Literal["all", "every_n", "skip", "only", "first_k", "last_k"]

_COUNTED: tuple[Selection, ...] = ("every_n", "first_k", "last_k")
_LISTED: tuple[Selection, ...] = ("skip", "only")


@dataclass(frozen=True, kw_only=True)
class BlockStrategy:
    """What happens to one block between its forward and its backward pass.

    Attributes:
        recompute: drop its activations and run it again in backward; if not, the block is plainly called.
        save_attention: keep the outputs of its attention on the device (``"keep"``), or offload them
            (``"park"``), so that the recompute does not run attention again.
        checkpoint: what runs the block in place of torch's non-reentrant checkpoint, for instance
            DeepSpeed's. It gets every input tensor as an argument of its own and handles RNG and memory
            itself, so that it goes with neither ``offload`` nor ``save_attention``.
    """

    recompute: bool = True
    offload: bool = False
    save_attention: SaveAttention = "no"
    checkpoint: CheckpointFunction | None = None

    def __post_init__(self) -> None:
        saves = self.offload or self.save_attention != "no"
        if not self.recompute and (saves or self.checkpoint):
            raise ValueError("a block that is not recomputed has nothing to offload, save or checkpoint")
        if self.checkpoint and saves:
            raise ValueError("a checkpoint function of your own goes with neither offload nor save_attention")

    def under(
        self, use_gradient_checkpointing: bool, use_gradient_checkpointing_offload: bool
    ) -> "BlockStrategy":
        """What of this strategy the two switches permit; either one permits the recompute."""
        if not (use_gradient_checkpointing or use_gradient_checkpointing_offload):
            return KEEP
        return (
            self if use_gradient_checkpointing_offload or not self.offload else replace(self, offload=False)
        )


KEEP = BlockStrategy(recompute=False)
RECOMPUTE = BlockStrategy()
OFFLOAD = BlockStrategy(offload=True)


@dataclass(frozen=True, kw_only=True)
class BlockPolicy:
    """Which blocks of a model get which strategy, as far as the two gradient switches permit it.

    Attributes:
        select: ``all`` blocks; ``every_n``: blocks 0, n, 2n, ...; ``first_k`` and ``last_k``: n blocks at
            one end; ``only`` the blocks listed; all but those (``skip``).
        n: number that belongs to ``every_n``, ``first_k`` and ``last_k``.
        blocks: indices from 0 in call order, for ``only`` and ``skip``.
    """

    select: Selection = "all"
    n: int | None = None
    blocks: tuple[int, ...] = ()
    selected: BlockStrategy = OFFLOAD
    others: BlockStrategy = KEEP

    def __post_init__(self) -> None:
        if (self.n is not None) != (self.select in _COUNTED):
            raise ValueError(f"n is {self.n}; {' and '.join(_COUNTED)} need it, and only they")
        if bool(self.blocks) != (self.select in _LISTED):
            raise ValueError(f"blocks is {self.blocks}; {' and '.join(_LISTED)} need it, and only they")
        if self.n is not None and self.n < 1:
            raise ValueError(f"n is {self.n}; it must be at least 1")
        if any(index < 0 for index in self.blocks) or len(set(self.blocks)) < len(self.blocks):
            raise ValueError(f"blocks is {self.blocks}; they count from 0, and each is named once")

    def strategy(self, index: int, num_blocks: int) -> BlockStrategy:
        """The strategy of one block."""
        if not 0 <= index < num_blocks:
            raise ValueError(f"block {index} was called in a model of {num_blocks} blocks")
        return self.selected if self._selects(index, num_blocks) else self.others

    def selection(self, num_blocks: int) -> list[int]:
        """The indices of the blocks selected.

        Raises:
            ValueError: the policy names blocks that do not exist, or selects none.
        """
        missing = [index for index in self.blocks if index >= num_blocks]
        if missing:
            raise ValueError(
                f"{self.select} names blocks {missing}; the model has blocks 0 to {num_blocks - 1}"
            )
        if self.n is not None and self.n > num_blocks:
            raise ValueError(f"{self.select} of {self.n} blocks; the model has {num_blocks}")
        indices = [index for index in range(num_blocks) if self._selects(index, num_blocks)]
        if not indices:
            raise ValueError(
                f"{self.select} of blocks {list(self.blocks)} selects none of {num_blocks} blocks"
            )
        return indices

    def _selects(self, index: int, num_blocks: int) -> bool:
        n = self.n or 1
        selects: dict[Selection, bool] = {
            "all": True,
            "every_n": index % n == 0,
            "skip": index not in self.blocks,
            "only": index in self.blocks,
            "first_k": index < n,
            "last_k": index >= num_blocks - n,
        }
        return selects[self.select]
