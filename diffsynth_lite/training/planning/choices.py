"""This file finds settings of a step that fit a device and its host, the fastest first.

What happens to all blocks, or to the first of them while the others are kept, is searched together with how
many blocks are streamed. The blocks that are kept come last: they are freed before those that are recomputed
need memory.
"""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from diffsynth_lite.config import Config
from diffsynth_lite.core.gradient import KEEP, OFFLOAD, RECOMPUTE, BlockPolicy, BlockStrategy
from diffsynth_lite.training.planning.memory_count import MemoryCount, MemoryCounter
from diffsynth_lite.training.planning.step import StepSettings

NUM_CHOICES = 8
WeightFormatName = Literal["none", "int8", "int8_convrot", "nf4"]
SMALLER_FORMATS: tuple[WeightFormatName, ...] = ("int8", "nf4")
"""Values of ``model.quantize`` that are tried where nothing fits as configured; other numbers follow."""
_ATTENTION_KEPT = BlockStrategy(save_attention="keep")
_ATTENTION_OFFLOADED = BlockStrategy(save_attention="park")
_BOTH_OFFLOADED = BlockStrategy(offload=True, save_attention="park")
_STRATEGIES = (KEEP, _ATTENTION_KEPT, _ATTENTION_OFFLOADED, _BOTH_OFFLOADED, RECOMPUTE, OFFLOAD)
"""Strategies that are tried."""
_SAME_SECONDS = 0.001
"""Relative difference below which estimates count as equally fast."""
_MOST_COUNTS = 2
"""Of a mixture of two strategies, each in a second or more: in most models these cover nearly all numbers."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The memory that a process may take.

    Attributes:
        num_sharing: processes of the machine, which share streamed weights.
        offload_ratio: fraction of the host memory left by the weights that the offload may take.
    """

    device: float
    host: float
    num_sharing: int = 1
    offload_ratio: float = 1.0

    def fits(self, count: MemoryCount) -> bool:
        """Whether a step takes no more than this."""
        return count.device <= self.device and self.host_needed(count) <= self.host

    def host_needed(self, count: MemoryCount) -> float:
        """Bytes of host memory that there must be for a step."""
        return count.weights_on_host / self.num_sharing + count.step.host / self.offload_ratio


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings, and the memory and time of a step under them.

    Attributes:
        seconds: estimate, more reliable as a ratio to that of another choice.
    """

    settings: StepSettings
    count: MemoryCount
    seconds: float

    def overrides(self, config: Config) -> list[str]:
        """The settings that differ from a config's, as ``key=value`` for the command line."""
        return as_overrides(changed_settings(self.settings, config))


def as_overrides(changes: Mapping[str, object]) -> list[str]:
    """Settings, by key, as ``key=value`` for the command line."""
    return [f"{key}={as_text(value)}" for key, value in changes.items()]


def changed_settings(settings: StepSettings, config: Config) -> dict[str, Any]:
    """The settings of a step that differ from a config's, by dotted key."""
    policy = settings.policy
    wanted: dict[str, Any] = {
        "model.quantize": settings.quantize,
        "train.micro_batch_size": settings.micro_batch_size,
        "memory.stream_blocks": settings.stream_blocks,
        "train.use_gradient_checkpointing": settings.use_gradient_checkpointing,
        "train.use_gradient_checkpointing_offload": settings.use_gradient_checkpointing_offload,
        "memory.policy": policy.select,
        "memory.policy_n": policy.n,
        "memory.policy_blocks": list(policy.blocks),
        "memory.save_attention": policy.selected.save_attention,
    }
    if config.train.micro_batch_tokens is not None:
        del wanted["train.micro_batch_size"]
    return {key: value for key, value in wanted.items() if setting_of(config, key) != value}


def setting_of(config: Config, key: str) -> Any:
    """The setting of a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def as_text(value: Any) -> str:
    """A setting as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def choices(
    counter: MemoryCounter,
    seconds: Callable[[StepSettings], float],
    kinds: Sequence[StepSettings],
    room: MemoryBudget,
) -> list[Choice]:
    """The best settings that fit, the fastest first: of equally fast ones, that with the least host memory.

    They are Pareto-optimal in time and memory.

    Args:
        seconds: returns the time of an optimizer step.
        kinds: settings as they may be, but for what happens to blocks and how many are streamed.
    """
    search = _Search(counter, seconds, room)
    found = [choice for settings in kinds for choice in search.best_of_each_kind(settings)]
    found.sort(key=lambda choice: (choice.seconds, room.host_needed(choice.count), choice.count.device))
    best: list[Choice] = []
    for choice in found:
        if len(best) < NUM_CHOICES and not any(_is_no_better(choice, other, room) for other in best):
            best = [other for other in best if not _is_no_better(other, choice, room)] + [choice]
    return best


def choices_of_first_format(
    counter: MemoryCounter,
    seconds: Callable[[StepSettings], float],
    kinds: Sequence[StepSettings],
    room: MemoryBudget,
    formats: Iterable[WeightFormatName],
) -> list[Choice]:
    """The ``choices`` in the first of some formats of weights in which anything fits; none if in none."""
    for name in dict.fromkeys(formats):
        found = choices(counter, seconds, [replace(kind, quantize=name) for kind in kinds], room)
        if found:
            return found
    return []


def _is_no_better(choice: Choice, other: Choice, room: MemoryBudget) -> bool:
    return (
        other.seconds <= choice.seconds * (1 + _SAME_SECONDS)
        and other.count.device <= choice.count.device
        and room.host_needed(other.count) <= room.host_needed(choice.count)
    )


def least_streamed(
    counter: MemoryCounter, settings: StepSettings, device_bytes: float
) -> StepSettings | None:
    """The settings with as few streamed blocks as fit the device; None where no number does."""
    tried = [replace(settings, stream_blocks=number) for number in _numbers_streamed(counter, settings)]
    place = bisect_left(tried, True, key=lambda one: counter.count(one).device <= device_bytes)
    return tried[place] if place < len(tried) else None


def _numbers_streamed(counter: MemoryCounter, settings: StepSettings) -> list[int]:
    if settings.num_shards > 1:
        return [0]
    return [0, *range(settings.stream_slots + 1, counter.num_blocks + 1)]


def least_of_device(counter: MemoryCounter, settings: StepSettings) -> StepSettings:
    """The settings that take least of the device: all blocks are treated alike.

    All are streamed, but where they are sharded.
    """
    tried = [
        replace(with_strategy(settings, strategy), stream_blocks="all") for strategy in _strategies(settings)
    ]
    if counter.num_blocks <= settings.stream_slots or settings.num_shards > 1:
        tried = [replace(one, stream_blocks=0) for one in tried]
    return min(tried, key=lambda one: counter.count(one).device)


def _strategies(settings: StepSettings) -> list[BlockStrategy]:
    saves = settings.saves_attention and not settings.compiles
    return [one for one in _STRATEGIES if one.save_attention == "no" or saves]


def with_strategy(
    settings: StepSettings, strategy: BlockStrategy, num_first: int | None = None
) -> StepSettings:
    """The settings with all blocks, or the first ones, treated in a way, and none streamed."""
    # As in a config: the strategy of a policy offloads where the setting permits it.
    selected = BlockStrategy(offload=True, save_attention=strategy.save_attention)
    policy = BlockPolicy(selected=selected)
    if num_first is not None:
        policy = BlockPolicy(select="first_k", n=num_first, selected=selected)
    return replace(
        settings,
        use_gradient_checkpointing=strategy.recompute,
        use_gradient_checkpointing_offload=strategy.offload,
        policy=policy,
        stream_blocks=0,
    )


class _Search:
    """The fastest settings of each kind: of a strategy, mixed with blocks that are kept or not, streamed
    or not.
    """

    def __init__(
        self, counter: MemoryCounter, seconds: Callable[[StepSettings], float], room: MemoryBudget
    ) -> None:
        self._counter, self._seconds, self._room = counter, seconds, room

    def best_of_each_kind(self, settings: StepSettings) -> Iterator[Choice]:
        """Those that fit."""
        effective = [one for one in _strategies(settings) if self._has_effect(settings, one)]
        for strategy in effective:
            alike = least_streamed(self._counter, with_strategy(settings, strategy), self._room.device)
            if alike is not None:
                yield from self._if_it_fits(alike)
        if self._counter.count(with_strategy(settings, KEEP)).device > self._room.device:
            for strategy in self._worth_mixing(settings, effective):
                yield from self._mixtures(settings, strategy)

    def _if_it_fits(self, settings: StepSettings) -> list[Choice]:
        count = self._counter.count(settings)
        if not self._room.fits(count):
            return []
        return [Choice(settings=settings, count=count, seconds=self._seconds(settings))]

    def _has_effect(self, settings: StepSettings, strategy: BlockStrategy) -> bool:
        """Whether all of a strategy has an effect; a setting without effect stops a run."""
        if strategy.save_attention == "no":
            return not strategy.offload or self._step(settings, strategy).host > 0
        without = RECOMPUTE if not strategy.offload else OFFLOAD
        saves = self._step(settings, strategy) != self._step(settings, without)
        return saves and self._has_effect(settings, without)

    def _step(self, settings: StepSettings, strategy: BlockStrategy) -> Any:
        return self._counter.count(with_strategy(settings, strategy)).step

    def _worth_mixing(
        self, settings: StepSettings, effective: Sequence[BlockStrategy]
    ) -> Iterator[BlockStrategy]:
        """The strategy that costs least per byte saved, one with host memory and one without."""
        kept = with_strategy(settings, KEEP)
        device, seconds = self._counter.count(kept).device, self._seconds(kept)

        def cost(strategy: BlockStrategy) -> float:
            alike = with_strategy(settings, strategy)
            saved = device - self._counter.count(alike).device
            return (self._seconds(alike) - seconds) / saved if saved > 0 else float("inf")

        for takes_host in (False, True):
            of_kind = [
                strategy
                for strategy in effective
                if strategy.recompute and (self._step(settings, strategy).host > 0) == takes_host
            ]
            if of_kind:
                yield min(of_kind, key=cost)

    def _mixtures(self, settings: StepSettings, strategy: BlockStrategy) -> Iterator[Choice]:
        """The fastest that stream nothing, and that stream; as few blocks as fit are not kept."""
        numbers = self._numbers_mixed(settings, strategy)
        streaming = list[Choice]()
        for num_streamed in _numbers_streamed(self._counter, settings):
            tried = [
                replace(with_strategy(settings, strategy, number), stream_blocks=num_streamed)
                for number in numbers
            ]
            place = bisect_left(
                tried, True, key=lambda one: self._counter.count(one).device <= self._room.device
            )
            found = self._if_it_fits(tried[place]) if place < len(tried) else []
            if num_streamed:
                streaming += found
            else:
                yield from found
        if streaming:
            yield min(streaming, key=lambda choice: choice.seconds)

    def _numbers_mixed(self, settings: StepSettings, strategy: BlockStrategy) -> list[int]:
        """The numbers of blocks that may use the strategy while the others are kept, by few counts."""
        by_count = defaultdict[Any, list[int]](list)
        for number in range(1, self._counter.num_blocks):
            by_count[self._counter.counted_as(with_strategy(settings, strategy, number))].append(number)
        most = sorted(by_count.values(), key=len, reverse=True)[:_MOST_COUNTS]
        return sorted(number for numbers in most for number in numbers)
