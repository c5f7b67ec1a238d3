"""This file says which item stands at which position of the endless stream of samples, and who takes it.

Both are arithmetic on the seed and the position, so resuming means to start at a later step, and the number
of processes and workers changes nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diffsynth_lite.core.randomness import permutation
from diffsynth_lite.errors import UserError


class SampleSchedule:
    """Passes over the items in random order: each item stands exactly ``repeats`` times in each pass.

    Args:
        num_items: items in the data set, at least 1.
        repeats: times an item is seen in a pass, at least 1.
        seed: seed of the run.
    """

    def __init__(self, num_items: int, repeats: int, seed: int) -> None:
        if num_items < 1 or repeats < 1:
            raise UserError(f"{num_items} items x {repeats} repeats: both must be at least 1")
        self.num_items = num_items
        self.samples_per_epoch = num_items * repeats
        self._seed = seed
        # One pass is kept: drawing it for each sample would make a step as slow as the data set is large.
        self._order_epoch = 0
        self._order = self._draw_order(0)

    def epoch(self, position: int) -> int:
        """Number of the pass, from 0, that the sample at ``position`` belongs to."""
        return position // self.samples_per_epoch

    def item(self, position: int) -> int:
        """Index of the item that stands at ``position``, in [0, num_items)."""
        epoch, index = divmod(position, self.samples_per_epoch)
        if epoch != self._order_epoch:
            self._order_epoch = epoch
            self._order = self._draw_order(epoch)
        return int(self._order[index]) % self.num_items

    def _draw_order(self, epoch: int) -> npt.NDArray[np.int64]:
        return permutation(self._seed, "order", epoch, self.samples_per_epoch)


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the samples of an optimizer step are shared out over micro-steps and processes.

    Raises:
        UserError: the global batch is not a whole number of micro-batches for each process.
    """

    global_batch_size: int
    """Samples of an optimizer step, over all processes."""

    micro_batch_size: int
    """Samples of one forward pass."""

    num_processes: int
    process_index: int

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.micro_batch_size) < 1:
            raise UserError(
                f"global_batch_size {self.global_batch_size} and micro_batch_size {self.micro_batch_size} "
                "must be at least 1"
            )
        at_once = self.micro_batch_size * self.num_processes
        whole, rest = divmod(self.global_batch_size, at_once)
        if rest:
            fitting = " or ".join(str(count * at_once) for count in (whole, whole + 1) if count)
            raise UserError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size "
                f"{self.micro_batch_size} x {self.num_processes} processes = {at_once}: {fitting} would do"
            )

    @property
    def num_micro_steps(self) -> int:
        """Forward passes of each process for one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.num_processes)

    def positions_of_step(self, step: int) -> range:
        """Positions that all processes together consume in optimizer step ``step``."""
        return range(step * self.global_batch_size, (step + 1) * self.global_batch_size)

    def micro_batch(self, step: int, micro_step: int) -> range:
        """Positions that this process consumes in ``micro_step`` of ``step``."""
        block = micro_step * self.num_processes + self.process_index
        start = block * self.micro_batch_size
        return self.positions_of_step(step)[start : start + self.micro_batch_size]
