"""This file says when a step is done whose copies run beside what it computes.

There are three streams: one computes, one copies to host memory, one copies back. What is copied when, and
who waits for it, is as the gradient engine and the weight stream do it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from diffsynth_lite.training.planning.device_speed import DeviceSpeed


class Sending(NamedTuple):
    """A copy to host memory, and how long the block has computed when it starts."""

    num_bytes: int
    after: float


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """Seconds that a block computes, and what it copies.

    Attributes:
        sent: what goes to host memory in forward, and comes back in backward.
    """

    forward: float
    recompute: float
    backward: float
    sent: tuple[Sending, ...] = ()


def simulated(
    blocks: Sequence[BlockTime],
    speed: DeviceSpeed,
    *,
    before: float = 0.0,
    between: float = 0.0,
    weights: Mapping[int, int] | None = None,
    num_slots: int = 2,
    resident_blocks: int = 1,
    prefetched_blocks: int = 1,
) -> float:
    """Seconds of a forward and a backward pass, waiting for copies included.

    Args:
        blocks: in call order.
        speed: of the copies.
        before: seconds that are computed before the blocks.
        between: seconds between their forward and their backward pass.
        weights: bytes of each streamed block, by its place; the first ones are in the slots.
        num_slots: as in ``WeightStream``.
        resident_blocks: as in ``GradientEngine``, as the next.
    """
    if not weights and not any(block.sent for block in blocks):
        return before + between + sum(block.forward + block.recompute + block.backward for block in blocks)
    streams = _Streams(speed)
    slots = _Slots(streams, weights or {}, num_slots)
    offloaded = _Offloaded(streams, blocks, resident_blocks, prefetched_blocks)
    streams.compute(before)
    for place in range(len(blocks)):
        slots.enter(place, backward=False)
        offloaded.forward(place)
    streams.compute(between)
    for place in reversed(range(len(blocks))):
        block = blocks[place]
        offloaded.before_backward(place)
        slots.enter(place, backward=True)
        streams.compute(block.recompute + block.backward)
    return streams.now


def simulated_forward(
    blocks: Sequence[BlockTime],
    speed: DeviceSpeed,
    *,
    before: float = 0.0,
    weights: Mapping[int, int] | None = None,
    num_slots: int = 2,
) -> float:
    """Seconds of a forward pass without gradients, which keeps nothing; arguments as :func:`simulated`."""
    streams = _Streams(speed)
    slots = _Slots(streams, weights or {}, num_slots)
    streams.compute(before)
    for place, block in enumerate(blocks):
        slots.enter(place, backward=False)
        streams.compute(block.forward)
    return streams.now


class _Streams:
    """When the stream that computes, and those of copies each way, are done with what they were given.

    Attributes:
        now: when what was computed so far is done.
    """

    def __init__(self, speed: DeviceSpeed) -> None:
        self._speed = speed
        self.now = self._out = self._in = 0.0

    def compute(self, seconds: float) -> None:
        """Compute for so long."""
        self.now += seconds

    def wait(self, until: float) -> None:
        """Compute nothing until then."""
        self.now = max(self.now, until)

    def send(self, num_bytes: int, after: float) -> float:
        """Copy to the host, once so much more is computed; when that is done."""
        seconds = num_bytes / self._speed.to_host_bytes
        if not self._speed.is_asynchronous:
            self.now += seconds
            return self.now
        self._out = max(self._out, self.now + after) + seconds
        return self._out

    def fetch(self, num_bytes: int) -> float:
        """Copy to the device; when that is done."""
        seconds = num_bytes / self._speed.to_device_bytes
        if not self._speed.is_asynchronous:
            self.now += seconds
            return self.now
        self._in = max(self._in, self.now) + seconds
        return self._in


class _Slots:
    """Which streamed weights are on the device, and from when on; as ``WeightStream`` does it."""

    def __init__(self, streams: _Streams, weights: Mapping[int, int], num_slots: int) -> None:
        self._streams, self._weights, self._num_slots = streams, weights, num_slots
        self._places = sorted(weights)
        self._index = {place: index for index, place in enumerate(self._places)}
        self._ready = dict.fromkeys(self._places[:num_slots], 0.0)

    def enter(self, place: int, *, backward: bool) -> None:
        """Wait for the weights of a block that runs, and start to copy those of the next ones."""
        if place not in self._weights:
            return
        index, number = self._index[place], self._num_slots
        if backward:
            wanted = self._places[max(0, index - number + 1) : index + 1][::-1]
        else:
            wanted = self._places[index : index + number]
        self._start(place, wanted)
        self._streams.wait(self._ready[place])
        for following in wanted[1:]:
            self._start(following, wanted)

    def _start(self, place: int, wanted: Sequence[int]) -> None:
        if place in self._ready:
            return
        left = next(one for one in self._ready if one not in wanted)
        del self._ready[left]
        self._ready[place] = self._streams.fetch(self._weights[place])


class _Offloaded:
    """What blocks have in host memory, and from when on it is back; as ``GradientEngine`` does it."""

    def __init__(
        self, streams: _Streams, blocks: Sequence[BlockTime], resident_blocks: int, prefetched_blocks: int
    ) -> None:
        self._streams, self._blocks = streams, blocks
        self._num_resident, self._num_prefetched = resident_blocks, prefetched_blocks
        self._places = [place for place, block in enumerate(blocks) if block.sent]
        self._resident: deque[tuple[int, float]] = deque()
        self._ready: dict[int, float] = {}

    def forward(self, place: int) -> None:
        """Compute a block, send what it offloads, and wait until what an earlier one sent has left."""
        block, done = self._blocks[place], 0.0
        for sent in block.sent:
            done = self._streams.send(sent.num_bytes, sent.after)
        self._streams.compute(block.forward)
        if not block.sent:
            return
        self._resident.append((place, done))
        if len(self._resident) > self._num_resident:
            self._streams.wait(self._resident.popleft()[1])

    def before_backward(self, place: int) -> None:
        """Wait for what a block offloaded, and start to fetch that of the blocks whose turn is next."""
        if not self._blocks[place].sent:
            return
        self._fetch(place)
        self._streams.wait(self._ready[place])
        self._places.pop()
        for earlier in reversed(self._places[-self._num_prefetched :] if self._num_prefetched else []):
            self._fetch(earlier)

    def _fetch(self, place: int) -> None:
        if place in self._ready:
            return
        if any(place == resident for resident, _ in self._resident):
            self._ready[place] = 0.0
            return
        num_bytes = sum(sent.num_bytes for sent in self._blocks[place].sent)
        self._ready[place] = self._streams.fetch(num_bytes)
