"""This file compares the memory of a training step with its prediction."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from accelerate import Accelerator

from diffsynth_lite.core.planning import CountingMeter
from diffsynth_lite.core.units import format_bytes

logger = logging.getLogger(__name__)

_TOLERATED = 0.05
"""Fraction of the prediction by which a step may exceed it without a warning."""


class Trained(Protocol):
    """The model that is trained, and its device."""

    accelerator: Accelerator

    @property
    def num_bytes_held(self) -> int:
        """Bytes of the device between two steps."""


class StepComparison:
    """Measures one step, and compares it with the prediction; does nothing without one.

    It is the second step of a start: the first one allocates memory that stays, such as optimizer state. On
    CUDA the allocator's peak is reset and read; on the CPU each tensor that operators make is counted. No
    result changes.
    """

    def __init__(
        self,
        predicted_bytes: int | None,
        trained: Trained,
        log: Callable[[int, Mapping[str, float]], None],
        start_step: int,
    ) -> None:
        self._predicted_bytes, self._trained = predicted_bytes, trained
        self._log, self._at_step = log, start_step + 2

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Scope of a step."""
        if self._predicted_bytes is None or step != self._at_step:
            yield
            return
        device = self._trained.accelerator.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            yield
            measured = torch.cuda.max_memory_allocated(device)
        else:
            held, meter = self._trained.num_bytes_held, CountingMeter(device)
            with meter:
                yield
            measured = held + meter.peak_bytes
        self._compare(step, self._predicted_bytes, measured)

    def _compare(self, step: int, predicted: int, measured: int) -> None:
        self._log(step, {"device_bytes_predicted": predicted, "device_bytes_measured": measured})
        logger.info(
            "device memory   %s in step %d; predicted for the largest size and longest prompt: %s (%+.1f %%)",
            format_bytes(measured),
            step,
            format_bytes(predicted),
            100 * (measured / predicted - 1),
        )
        if measured > (1 + _TOLERATED) * predicted:
            logger.warning(
                "A step takes %.0f %% more of the device than was predicted; where memory is short, set "
                "memory.device_gib lower by as much.",
                100 * (measured / predicted - 1),
            )
