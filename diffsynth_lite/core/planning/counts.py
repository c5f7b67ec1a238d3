"""This file counts what a training step takes, from a few blocks of each kind in place of all.

A step is a row of segments: before the blocks, the forward pass of each, between forward and backward, the
backward pass of each, and after them. In a run of blocks that are alike and have the same strategy, segments
repeat: each changes what is held by the same bytes, needs the same for a while, and computes the same. So a
few blocks of a run are enough to count any number of them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from typing import Any

from torch import Tensor, nn

from diffsynth_lite.core.gradient import BlockPolicy, blocks_in
from diffsynth_lite.core.gradient.arguments import take_tensors
from diffsynth_lite.core.gradient.engine import GradientEngine
from diffsynth_lite.core.gradient.frames import in_backward
from diffsynth_lite.core.planning.kernels import CudaAutocast
from diffsynth_lite.core.planning.meters import CountingMeter, Work


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Blocks, neighbours in a counted model, that stand for more.

    Attributes:
        num_left_out: how many more times they are in the whole model.
    """

    first: int
    num_blocks: int
    num_left_out: int


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Bytes that a training step holds in addition to weights and inputs, and what it computes.

    Attributes:
        kept: on the device between forward and backward.
        peak: most on the device in the whole step, gradients included.
        backward: what the backward pass does, with what blocks compute again in it.
    """

    kept: int
    peak: int
    host: int
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)


def fewer_blocks(kinds: Sequence[Any], num_neighbours: int) -> tuple[list[int], list[Repeat]]:
    """Which blocks of a list stand for all.

    Args:
        kinds: of all blocks in call order; those that are alike and treated alike are equal.
        num_neighbours: blocks on either side of one that can change what is held while it runs, at least 1:
            those whose inputs are on the device at the same time.

    Returns:
        The places of the blocks that are kept, and which of these stand for more, by places among them.
    """
    # The one that stands for more has as many on both sides, and one more before it.
    num_kept = 2 * num_neighbours + 2
    kept: list[int] = []
    repeats: list[Repeat] = []
    place = 0
    while place < len(kinds):
        period, times = _longest_repeat(kinds[place:], num_kept)
        if times > num_kept:
            first = len(kept) + (num_kept // 2) * period
            repeats.append(Repeat(first=first, num_blocks=period, num_left_out=times - num_kept))
        kept += range(place, place + min(times, num_kept) * period)
        place += times * period
    return kept, repeats


def _longest_repeat(kinds: Sequence[Any], num_kept: int) -> tuple[int, int]:
    """Length of the shortest pattern that is at the start more than ``num_kept`` times, and how often."""
    for period in range(1, len(kinds) // (num_kept + 1) + 1):
        times = 1
        while kinds[times * period : (times + 1) * period] == kinds[:period]:
            times += 1
        if times > num_kept:
            return period, times
    return 1, 1


def count_step(
    loss: Callable[[], Tensor],
    backward: Callable[[Tensor], None],
    blocks: Sequence[nn.Module],
    meter: CountingMeter,
    engine: GradientEngine,
    *,
    autocast: CudaAutocast | None = None,
) -> "CountedStep":
    """Take a training step, and note what each part of it holds and computes.

    Args:
        loss: the forward pass, through the engine. The step before was of the same kind, so that the engine
            knows what the blocks share.
        autocast: of the forward pass on meta; None is none, or a real one.
    """
    recorder = _Recorder(meter, engine, blocks)
    released = autocast.on_cast_released(recorder.release) if autocast else nullcontext()
    with meter, _parts_marked(blocks, recorder.mark), released:
        meter.start()
        recorder.mark("before")
        value = loss()
        recorder.mark("between")
        backward(value)
        del value
        recorder.mark("end")
    return CountedStep(recorder.segments())


PartName = str | tuple[str, int | None]
"""A name of its own, or a phase and the place of a block."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a step.

    Attributes:
        change: how many more bytes are on the device at its end than at its start.
    """

    change: int
    extra: int
    host_change: int
    work: Work


@dataclass(frozen=True)
class CountedStep:
    """The parts of a step, by name and in order, that was counted with a few blocks.

    Attributes:
        lasting: bytes that the model keeps after its first step, such as rotary tables.
    """

    segments: tuple[tuple[PartName, Segment], ...]
    lasting: int = 0

    def stretched(self, repeats: Sequence[Repeat] = ()) -> StepCost:
        """What the step takes if some blocks stand for more, whose parts are repeated."""
        level = host = peak = kept = most_on_host = 0
        work = forward = Work()
        segments = dict(self.segments)
        for name in _with_repeats(segments, repeats):
            if name == "between":
                kept, most_on_host, forward = level, host, work
            if name not in segments:  # of a block that needs no gradient
                continue
            segment = segments[name]
            peak = max(peak, level + segment.extra)
            level, host = level + segment.change, host + segment.host_change
            work += segment.work
        return StepCost(
            kept=kept + self.lasting,
            peak=peak + self.lasting,
            host=most_on_host,
            forward=forward,
            backward=work - forward,
        )


class _Recorder:
    """Notes what is held and computed where each part of a step begins, and the peak since the one before.

    Parts are named ``("forward", place)`` of a block, ``("release", place)`` where what autocast made of its
    weights goes, and ``("backward", place)``; and ``before`` and so on.
    """

    def __init__(self, meter: CountingMeter, engine: GradientEngine, blocks: Sequence[nn.Module]) -> None:
        self._meter, self._engine = meter, engine
        self._places = {weight: place for place, block in enumerate(blocks) for weight in block.parameters()}
        self._marks: dict[PartName, tuple[int, int, int, Work]] = {}

    def mark(self, name: PartName) -> None:
        """Note that a part begins, unless it has begun already."""
        if name in self._marks:
            return
        host = self._engine.host_pool.num_bytes_lent
        self._marks[name] = self._meter.num_bytes, self._meter.peak_bytes, host, self._meter.work
        self._meter.restart_peak()

    def release(self, weight: nn.Parameter) -> None:
        """Note that what autocast made of a block's weights goes."""
        self.mark(("release", self._places.get(weight)))

    def segments(self) -> tuple[tuple[PartName, Segment], ...]:
        """The parts by name, in order."""
        return tuple(
            (
                name,
                Segment(
                    change=after[0] - before[0],
                    extra=after[1] - before[0],
                    host_change=after[2] - before[2],
                    work=after[3] - before[3],
                ),
            )
            for (name, before), (_, after) in pairwise(self._marks.items())
        )


@contextmanager
def _parts_marked(blocks: Sequence[nn.Module], mark: Callable[[tuple[str, int]], None]) -> Iterator[None]:
    """Scope in which ``mark`` is called where the forward pass of each block begins, and its backward pass.

    Args:
        mark: gets ``("forward", place)`` and ``("backward", place)``; the latter once for each tensor that
            the block returns.
    """

    def forward(place: int) -> None:
        if not in_backward():
            mark(("forward", place))

    def follow(place: int, output: Any) -> None:
        if in_backward():
            return
        for tensor in take_tensors(output)[0]:
            if tensor.requires_grad:
                tensor.register_hook(lambda _gradient: mark(("backward", place)))  # type: ignore[no-untyped-call]

    hooks = [
        hook
        for place, block in enumerate(blocks)
        for hook in (
            block.register_forward_pre_hook(lambda *_, place=place: forward(place)),
            block.register_forward_hook(lambda _block, _args, output, place=place: follow(place, output)),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_repeats(names: Iterable[PartName], repeats: Sequence[Repeat]) -> Iterator[PartName]:
    """Parts of a step, in order; those of blocks that stand for more come as often as in the whole model."""
    again: dict[PartName, list[PartName]] = {}
    for repeat in repeats:
        places = range(repeat.first, repeat.first + repeat.num_blocks)
        for phase in ("forward", "release"):
            parts: list[PartName] = [(phase, place) for place in places]
            again[phase, places[-1]] = parts * repeat.num_left_out
        parts = [("backward", place) for place in reversed(places)]
        again["backward", places[0]] = parts * repeat.num_left_out
    for name in names:
        yield name
        yield from again.get(name, [])


@dataclass(frozen=True, kw_only=True)
class FewBlocks:
    """Blocks of a model that stand for all of them under a policy.

    Attributes:
        kept: their places in each list of blocks.
        kinds: a number for each of them, the same for blocks that are alike.
        repeats: which of them stand for more. All else is the same for models that differ only in the
            length of their runs.
    """

    kept: tuple[tuple[int, ...], ...]
    kinds: tuple[int, ...]
    policy: BlockPolicy
    repeats: tuple[Repeat, ...]


class BlockLists:
    """The lists of blocks of a model, and which of their blocks are alike.

    Args:
        ranks: of the layers with adapters, by their full names in the model: of each adapter that can be on
            one, 0 for none.
        are_alike: whether any of them are; else each stands for itself.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        ranks: Mapping[str, tuple[int, ...]],
        *,
        are_alike: bool = True,
    ) -> None:
        self._names, self._layers = tuple(names), tuple(ranks)
        known: dict[Any, int] = {}
        self._kinds = [
            [
                known.setdefault(_kind(block, f"{name}.", ranks) if are_alike else name, len(known))
                for block, name in _named_blocks(model, block_list)
            ]
            for block_list in names
        ]
        self.num_blocks = sum(map(len, self._kinds))

    def few(self, policy: BlockPolicy, *, num_neighbours: int) -> FewBlocks:
        """The blocks that stand for all under a policy."""
        is_chosen = [False] * self.num_blocks
        for place in policy.selection(self.num_blocks):
            is_chosen[place] = True
        all_kept, kinds = [], list[tuple[int, bool]]()
        repeats = list[Repeat]()
        place = 0
        for of_list in self._kinds:
            treated = list(zip(of_list, is_chosen[place : place + len(of_list)], strict=True))
            kept, found = fewer_blocks(treated, num_neighbours)
            repeats += [replace(repeat, first=repeat.first + len(kinds)) for repeat in found]
            kinds += [treated[index] for index in kept]
            all_kept.append(tuple(kept))
            place += len(of_list)
        # Where all blocks are kept, others that are in no list may be called between them.
        if len(kinds) < self.num_blocks:
            selected = tuple(compress(range(len(kinds)), (chosen for _, chosen in kinds)))
            policy = replace(policy, select="only", n=None, blocks=selected)
        return FewBlocks(
            kept=tuple(all_kept),
            kinds=tuple(kind for kind, _ in kinds),
            policy=policy,
            repeats=tuple(repeats),
        )

    def keep_in(self, model: nn.Module, few: FewBlocks) -> dict[str, str]:
        """Leave the other blocks out of a model like this one.

        Returns:
            The names that the layers with adapters then have, and those that they had.
        """
        names = {name: name for name in self._layers}
        for block_list, of_list, kept in zip(self._names, self._kinds, few.kept, strict=True):
            if len(kept) < len(of_list):
                blocks = blocks_in(model, [block_list])
                model.set_submodule(block_list, nn.ModuleList([blocks[index] for index in kept]))
                names = _renamed(names, block_list, kept)
        return names


def _named_blocks(model: nn.Module, block_list: str) -> list[tuple[nn.Module, str]]:
    blocks = blocks_in(model, [block_list])
    if not isinstance(model.get_submodule(block_list), nn.ModuleList):
        return [(blocks[0], block_list)]
    return [(block, f"{block_list}.{index}") for index, block in enumerate(blocks)]


def _kind(block: nn.Module, prefix: str, ranks: Mapping[str, tuple[int, ...]]) -> tuple[Any, ...]:
    """Equal for blocks that are alike: their class, shapes of weights, and ranks of layers with adapters."""
    shapes = tuple((name, tuple(weight.shape)) for name, weight in block.named_parameters())
    adapted = frozenset(
        (name.removeprefix(prefix), rank) for name, rank in ranks.items() if name.startswith(prefix)
    )
    return type(block), shapes, adapted


def _renamed(names: Mapping[str, str], block_list: str, kept: Sequence[int]) -> dict[str, str]:
    """Names of layers, and those that they had, after some blocks of a list were left out."""
    renamed, prefix = dict[str, str](), f"{block_list}."
    for name, old in names.items():
        if not name.startswith(prefix):
            renamed[name] = old
            continue
        index, _, rest = name.removeprefix(prefix).partition(".")
        if int(index) in kept:
            renamed[f"{prefix}{kept.index(int(index))}.{rest}"] = old
    return renamed
