"""This file decides the items of each block of the endless stream of samples, and the process that takes it.

A block is one micro-batch, of one bucket. All of it is arithmetic on the seed and the number of the block, so
resuming means to start at a later block, and the number of processes and workers changes nothing. Nothing is
dropped or padded:

- A bucket is an endless stream of passes. In pass e a source with a rate of r samples gives
  floor((e + 1) r) - floor(e r), taken in turn from permutations of its items, and the pass is shuffled.
- A cycle takes about one pass of each bucket: bucket j has floor(c n_j / size_j) blocks before cycle c, with
  n_j its mean samples a pass. Buckets are shuffled within a cycle; the blocks of one run in order.
  So the number of blocks before any cycle or pass has a closed form, and a position is found by bisection.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from diffsynth_lite.core.randomness import permutation
from diffsynth_lite.data.item_table import Indices, ItemGroup
from diffsynth_lite.errors import UserError

_COUNTED_AT_ONCE = 2**16


class Numbers(Protocol):
    """Integers that can be sliced, such as an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Indices: ...


Orders = Callable[[str, int, int, Callable[[], Indices]], Numbers]
"""Stores random orders: takes the name of a sequence of them, which includes everything that decides them,
the number in it, the length, and what draws the order."""


def draw_order(name: str, number: int, length: int, draw: Callable[[], Indices]) -> Numbers:
    """Store nothing: draw the order."""
    return draw()


class SampleSchedule:
    """The blocks of a run.

    Args:
        groups: the items, by their buckets and sources, in ascending order.
        passes: times that an item of each source is seen in a pass: repeats x weight, more than 0.
        sizes: samples of a block of each bucket, at least 1.
    """

    def __init__(
        self,
        groups: Sequence[ItemGroup],
        *,
        passes: Sequence[Fraction],
        sizes: Sequence[int],
        seed: int,
        orders: Orders = draw_order,
    ) -> None:
        if not groups:
            raise UserError("there are no items to train on")
        if min(sizes) < 1 or min(passes) <= 0:
            raise UserError(
                f"micro-batches of {list(sizes)} samples must be at least 1 and repeats x weight "
                f"{[float(value) for value in passes]} more than 0"
            )
        self.sizes = tuple(sizes)
        self._seed = seed
        self._orders = orders
        self._streams = [
            _BucketStream(
                [(group, passes[group.source]) for group in groups if group.bucket == bucket],
                seed=seed,
                purpose=f"bucket-{bucket}",
                orders=orders,
            )
            for bucket in range(len(sizes))
        ]
        self._blocks_per_pass = [
            stream.samples_per_pass / size for stream, size in zip(self._streams, sizes, strict=True)
        ]
        # One cycle is kept: finding it goes through all buckets, which for 50 of them takes 0.1 ms a block.
        self._cycle_start = 0
        self._cycle = _Cycle([0] * len(sizes), self.sizes, np.zeros(0, np.uint16))

    @property
    def samples_per_pass(self) -> Fraction:
        """Mean number of samples of a pass over all buckets."""
        return sum((stream.samples_per_pass for stream in self._streams), Fraction(0))

    def block(self, index: int) -> dict[int, int]:
        """Index of the item at each position of block number ``index``, from 0; positions have no gaps."""
        if not 0 <= index - self._cycle_start < len(self._cycle):
            number, self._cycle_start = _find(self._blocks_per_pass, index)
            self._cycle = self._draw_cycle(number)
        bucket, before = self._cycle.block(index - self._cycle_start)
        position, size = int(before @ self._cycle.sizes), self.sizes[bucket]
        start, stream = int(before[bucket]) * size, self._streams[bucket]
        return {position + place: stream.item(start + place) for place in range(size)}

    def _draw_cycle(self, number: int) -> "_Cycle":
        before, until = (
            [_floor(cycle, rate) for rate in self._blocks_per_pass] for cycle in (number, number + 1)
        )
        length = sum(until) - sum(before)

        def draw() -> Indices:
            labels = np.repeat(np.arange(len(before), dtype=np.uint16), np.subtract(until, before))
            return labels[permutation(self._seed, "cycle", number, length)]

        name = f"cycle of {_name(self._blocks_per_pass)} blocks, seed {self._seed}"
        return _Cycle(before, self.sizes, self._orders(name, number, length, draw))


class _Cycle:
    """The blocks of a cycle. Only their order is stored, as they are read one after the other.

    Args:
        before: number of blocks of each bucket before the cycle.
        labels: bucket of each block.
    """

    def __init__(self, before: Sequence[int], sizes: Sequence[int], labels: Numbers) -> None:
        self._labels = labels
        self.sizes = np.array(sizes, np.int64)
        self._before = np.array(before, np.int64)
        self._counted, self._ordinals = 0, self._before.copy()

    def __len__(self) -> int:
        return len(self._labels)

    def block(self, place: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Bucket of the block at a place of the cycle, and the number of blocks of each bucket before it.

        O(1) if the last call was for the place before.
        """
        if place < self._counted:
            self._counted, self._ordinals = 0, self._before.copy()
        for start in range(self._counted, place, _COUNTED_AT_ONCE):
            passed = self._labels[start : min(start + _COUNTED_AT_ONCE, place)]
            self._ordinals += np.bincount(passed, minlength=len(self.sizes))
        self._counted = place
        return int(self._labels[place : place + 1][0]), self._ordinals


class _BucketStream:
    """The endless stream of one bucket's samples, from its groups: the items of a source and their passes."""

    def __init__(
        self, groups: Sequence[tuple[ItemGroup, Fraction]], *, seed: int, purpose: str, orders: Orders
    ) -> None:
        self._groups = [group for group, _ in groups]
        self._rates = [group.count * passes for group, passes in groups]
        self.samples_per_pass = sum(self._rates, Fraction(0))
        self._seed = seed
        self._purpose = purpose
        self._orders = orders
        # One pass is kept: drawing it for each sample would make a step as slow as the data set is large.
        self._pass = -1
        self._start = self._end = 0
        self._order: Numbers = np.zeros(0, np.uint32)

    def item(self, place: int) -> int:
        """Index of the item at a place of the stream."""
        if not self._start <= place < self._end:
            self._pass, self._start = _find(self._rates, place)
            self._end = _before(self._rates, self._pass + 1)
            self._order = self._orders(
                f"{self._purpose}, pass of {_name(self._rates)} samples, seed {self._seed}",
                self._pass,
                self._end - self._start,
                lambda: self._draw_pass(self._pass),
            )
        at = place - self._start
        return int(self._order[at : at + 1][0])

    def _draw_pass(self, number: int) -> Indices:
        """Items of a pass, in their order."""
        slots = [
            self._take(group, _floor(number, rate), _floor(number + 1, rate))
            for group, rate in enumerate(self._rates)
        ]
        together = np.concatenate(slots)
        return together[permutation(self._seed, f"{self._purpose}:pass", number, len(together))]

    def _take(self, group: int, start: int, end: int) -> Indices:
        """Items at [start, end) of a group's own stream of permutations."""
        members = self._groups[group].members()
        first = start // len(members)
        turns = [
            members[permutation(self._seed, f"{self._purpose}:group-{group}", turn, len(members))]
            for turn in range(first, -(-end // len(members)))
        ]
        return np.concatenate([members[:0], *turns])[start - first * len(members) :][: end - start]


def _name(rates: Sequence[Fraction]) -> str:
    return " + ".join(map(str, rates))


def _floor(count: int, rate: Fraction) -> int:
    return count * rate.numerator // rate.denominator


def _before(rates: Sequence[Fraction], number: int) -> int:
    """Blocks or samples, of these rates, before a cycle or pass."""
    return sum(_floor(number, rate) for rate in rates)


def _find(rates: Sequence[Fraction], place: int) -> tuple[int, int]:
    """Number of the cycle or pass that contains a place, and its start.

    That is a sum of terms that are rounded down, so it lies less than their number below its mean.
    """
    rate, before = sum(rates, Fraction(0)), partial(_before, rates)
    lowest = int(place / rate)
    highest = int((place + len(rates)) / rate) + 1
    number = bisect_right(range(highest + 1), place, lo=lowest, key=before) - 1
    return number, before(number)


def micro_batch_sizes(
    tokens: Sequence[int], *, micro_batch_size: int, micro_batch_tokens: int | None
) -> list[int]:
    """Samples of a micro-batch of each bucket.

    Args:
        micro_batch_size: for all buckets, where there is no budget.
        micro_batch_tokens: most tokens of a micro-batch; a sample with more is a micro-batch by itself.
    """
    if micro_batch_tokens is None:
        return [micro_batch_size] * len(tokens)
    return [max(1, micro_batch_tokens // count) for count in tokens]


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """Distribution of the blocks of an optimizer step over micro-steps and processes."""

    global_batch_size: int
    """Samples of an optimizer step, over all processes."""

    micro_batch_size: int
    """Samples of one forward pass; with a token budget the size that ``global_batch_size`` is counted in."""

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
            other = " or ".join(str(count * at_once) for count in (whole, whole + 1) if count)
            raise UserError(
                f"global_batch_size {self.global_batch_size} is not a multiple of micro_batch_size "
                f"{self.micro_batch_size} x {self.num_processes} processes = {at_once}: {self._fitting()} "
                f"would do; with global_batch_size {other} it would be another run"
            )

    def _fitting(self) -> str:
        """The most processes and samples at once that divide the global batch, in words."""
        processes = _largest_divisor(self.global_batch_size, at_most=self.num_processes)
        samples = _largest_divisor(self.global_batch_size // processes, at_most=self.micro_batch_size)
        parts = [f"{processes} processes"] if processes < self.num_processes else []
        parts += [f"micro_batch_size {samples}"] if samples < self.micro_batch_size else []
        return " with ".join(parts)

    @property
    def num_micro_steps(self) -> int:
        """Forward passes of each process for one optimizer step."""
        return self.global_batch_size // (self.micro_batch_size * self.num_processes)

    def blocks_of_step(self, step: int) -> range:
        """Numbers of the blocks that all processes together consume in optimizer step ``step``."""
        count = self.num_micro_steps * self.num_processes
        return range(step * count, (step + 1) * count)


def _largest_divisor(number: int, *, at_most: int) -> int:
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
