"""This file times the parts of steps, and warns once where steps take twice as long as they did.

The two numbers that are compared are medians over steps of the same sizes. What lies between steps, such as
previews and checkpoints, is in neither, and single slow steps move no median.
"""

import logging
import platform
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_NUM_LEFT_OUT = 5
"""First steps of a process, in which kernels are chosen and memory is allocated; memory.auto measures one."""
_NUM_FIRST = 50
_NUM_LAST = 20
_SLOWER = 2.0
_FULL = 0.97
"""Part of the device's memory from which on nothing is free; CUDA itself and other programs have some."""
_MIN_CLOCK = 0.75
"""Part of an earlier clock rate; GPUs vary it by a tenth without being slowed down."""
_SWAPPED_BYTES = 256 * 2**20
_LITTLE_MEMORY = 0.1
_BUSY = 1.5
"""Load from which on programs wait for processors; that of a run that uses all of them is 1."""


class StepTimer:
    """Seconds of the parts of steps, by the clock of the CPU or by that of a GPU, for which nothing waits.

    On CUDA a mark is an event among the kernels: a part lasts until the device has come to its end, and where
    the device waits for the host, for data above all, the wait is in the part. Other devices that compute
    later than they are called have no parts.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device_type = "cpu" if device is None else device.type
        self._marks: deque[tuple[str, Any]] = deque()

    def mark(self, part: str) -> None:
        """End a part; it began at the mark before."""
        if self._device_type == "cuda":
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((part, event))
        elif self._device_type == "cpu":
            self._marks.append((part, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each part since the last call, as far as the device has come."""
        taken: defaultdict[str, float] = defaultdict(float)
        while len(self._marks) > 1:
            (_, start), (part, end) = self._marks[0], self._marks[1]
            is_event = self._device_type == "cuda"
            if is_event and not end.query():
                break
            taken[part] += start.elapsed_time(end) / 1000 if is_event else end - start
            self._marks.popleft()
        return taken


@dataclass(frozen=True, kw_only=True)
class MachineState:
    """What may slow a run down, as far as it can be read.

    Attributes:
        device_used: part of the device's memory that is taken, by all programs; above 1 where the driver
            lends the host's.
        allocator_retries: how often torch gave memory back to the device in order to get other.
        clock_mhz: of the GPU's processors.
        celsius: of the GPU.
        swapped_bytes: in the swap space, or read from it since the machine started.
        available: part of the host's memory that is free or holds files.
        load: threads of all programs that want to run, averaged over a minute, for each processor.
    """

    device_used: float | None = None
    allocator_retries: int = 0
    clock_mhz: float | None = None
    celsius: float = 0.0
    swapped_bytes: int = 0
    available: float = 1.0
    load: float = 0.0

    @classmethod
    def read(cls, device: torch.device) -> "MachineState":
        """The state now."""
        import psutil

        swap, memory = psutil.swap_memory(), psutil.virtual_memory()
        state = cls(
            swapped_bytes=swap.used + swap.sin,
            available=memory.available / memory.total,
            load=psutil.getloadavg()[0] / (psutil.cpu_count() or 1),
        )
        if device.type != "cuda":
            return state
        free, total = torch.cuda.mem_get_info(device)
        state = replace(
            state,
            device_used=max(total - free, torch.cuda.memory_reserved(device)) / total,
            allocator_retries=torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
        )
        with suppress(ImportError):
            from pynvml import NVMLError

            with suppress(NVMLError, RuntimeError):  # the driver has neither
                clock, celsius = torch.cuda.clock_rate(device), torch.cuda.temperature(device)
                return replace(state, clock_mhz=clock, celsius=celsius)
        return state


class StepTime(NamedTuple):
    """Seconds of a step, and of its wait for data."""

    seconds: float
    waiting: float

    @classmethod
    def median(cls, steps: Iterable["StepTime"]) -> "StepTime":
        """Of both by themselves."""
        return cls(*map(median, zip(*steps, strict=True)))


def likely_causes(first: StepTime, last: StepTime, before: MachineState, now: MachineState) -> Iterator[str]:
    """What explains that steps take longer, with its figures; nothing where it is not known."""
    if last.waiting - first.waiting > (last.seconds - first.seconds) / 2:
        memory = f"; {100 * now.available:.0f} % of the host's memory is left, too little to keep files in"
        yield (
            f"steps wait {last.waiting:.3g} s for data instead of {first.waiting:.3g}: the disk of "
            "data.cache_dir is slow, or data.num_workers too few" + memory * (now.available < _LITTLE_MEMORY)
        )
    if now.device_used is not None and now.device_used > _FULL:
        is_windows = sys.platform == "win32" or "microsoft" in platform.release().lower()
        lends = ", where the driver of Windows then lends the host's" * is_windows
        yield f"{100 * now.device_used:.0f} % of the device's memory is taken{lends}"
    if retries := now.allocator_retries - before.allocator_retries:
        yield f"torch had to free memory of the device {retries} times to get other"
    if before.clock_mhz and now.clock_mhz and now.clock_mhz < _MIN_CLOCK * before.clock_mhz:
        yield (
            f"the GPU's clock fell from {before.clock_mhz:.0f} to {now.clock_mhz:.0f} MHz at "
            f"{now.celsius:.0f} degrees"
        )
    if (swapped := now.swapped_bytes - before.swapped_bytes) > _SWAPPED_BYTES:
        yield f"the host ran out of memory and swapped {swapped / 2**20:.0f} MiB"
    if now.load > max(_BUSY, before.load):
        yield f"programs want {now.load:.1f} times as many processors as there are"


class SpeedWatch:
    """Warns once where the last 20 steps took more than twice as long as the first 50 of the same sizes.

    Args:
        machine: reads its state, with the first steps and where steps are slower.
    """

    def __init__(self, machine: Callable[[], MachineState]) -> None:
        self._machine = machine
        self._num_steps = 0
        self._before: MachineState | None = None
        self._steps: defaultdict[str, list[StepTime]] = defaultdict(list)
        self._has_warned = False

    def after_step(self, sizes: str, seconds: float, parts: Mapping[str, float]) -> None:
        """Take one more step into account.

        Args:
            sizes: of its micro-batches; only steps of the same are compared.
            parts: as :class:`StepTimer` has them.
        """
        self._num_steps += 1
        if self._has_warned or self._num_steps <= _NUM_LEFT_OUT:
            return
        steps = self._steps[sizes]
        steps.append(StepTime(seconds, parts.get("data", 0.0)))
        if self._before is None and len(steps) == _NUM_FIRST:
            self._before = self._machine()
        if self._before is None or len(steps) < _NUM_FIRST + _NUM_LAST:
            return
        first, last = StepTime.median(steps[:_NUM_FIRST]), StepTime.median(steps[_NUM_FIRST:])
        del steps[_NUM_FIRST]
        if last.seconds <= _SLOWER * first.seconds:
            return
        self._has_warned = True
        causes = list(likely_causes(first, last, self._before, self._machine()))
        logger.warning(
            "Steps have become slower (%s): the last %d took %.3g s, the first %d took %.3g s (medians). "
            "Likely cause: %s.",
            *(sizes, _NUM_LAST, last.seconds, _NUM_FIRST, first.seconds),
            "; ".join(causes) or "not known",
        )
