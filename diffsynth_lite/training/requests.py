"""This file decides after each step what else a run is to do: the plan, signals, request files, the clock."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator

from diffsynth_lite.training.optimizer_step import StepResult
from diffsynth_lite.training.signals import StopRequest

logger = logging.getLogger(__name__)

REQUEST_FILES = ("STOP", "SAVE", "SAMPLE")
"""Names that a person gives a file, of any content, in the run folder; it is removed when it is seen."""


def every(steps: int | None, *, last_step: int) -> Callable[[int], bool]:
    """Whether something is due after a step: every so many, counted from the start of the run, and the last.

    Args:
        steps: interval in optimizer steps; None is at the last step only.
        last_step: of the run.
    """
    return lambda step: step == last_step or (steps is not None and step % steps == 0)


def remove_old_requests(folder: Path) -> None:
    """Remove the request files that were left from before this start."""
    for name in REQUEST_FILES:
        if _take(folder / name):
            logger.warning("%s was there before this start; removed, as if it had not been.", folder / name)


@dataclass(kw_only=True)
class Requests:
    """What a run does between its steps, planned or asked for; all processes get the same answers.

    Attributes:
        folder: of the run, where request files are put.
        signals: ask to stop.
        accelerator: of the run; its main process looks at the files and the clock.
        save: called with the step to save at.
        sample: called with the step to evaluate at.
        saves_at: whether a save is planned after a step.
        samples_at: whether an evaluation is.
        save_every_minutes: longest time without a save; None saves by steps alone.
        stop: whether the run is to stop.
    """

    folder: Path
    signals: StopRequest
    accelerator: Accelerator
    save: Callable[[int], None]
    sample: Callable[[int], None]
    saves_at: Callable[[int], bool]
    samples_at: Callable[[int], bool]
    save_every_minutes: float | None
    stop: bool = False
    _saved_at: float = field(default_factory=lambda: time.monotonic())

    def after_step(self, result: StepResult) -> None:
        """Do what is planned, and what was asked for since the last step; the one who stops saves."""
        stop, save, sample = self._agreed()
        # First: a step's checkpoint is written once, and holds whether it is the best.
        if sample or self.samples_at(result.step):
            self.sample(result.step)
        if save or self.saves_at(result.step):
            self.save(result.step)
            self._saved_at = time.monotonic()
        self.stop = stop

    def _agreed(self) -> list[bool]:
        """Whether any process is asked to stop, to save, to sample."""
        asked = [self.signals.asked, False, False]
        if self.accelerator.is_main_process:
            files = [_take(self.folder / name) for name in REQUEST_FILES]
            for name in (name for name, is_there in zip(REQUEST_FILES, files, strict=True) if is_there):
                logger.info("%s: found in the run folder.", name)
            asked = [one or other for one, other in zip(asked, files, strict=True)]
            asked[1] = asked[1] or self._is_time_to_save()
        if self.accelerator.num_processes == 1:
            return asked
        counts = torch.tensor(asked, dtype=torch.float32, device=self.accelerator.device)
        return [count > 0 for count in self.accelerator.reduce(counts, reduction="sum").tolist()]

    def _is_time_to_save(self) -> bool:
        if self.save_every_minutes is None:
            return False
        return time.monotonic() - self._saved_at >= 60 * self.save_every_minutes


def _take(path: Path) -> bool:
    """Whether the file is there; it is not any more."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:  # a folder of that name, or one that may not be written to: nobody's request
        logger.warning("%s cannot be removed (%s), so it is no request.", path, error.strerror)
        return False
    return True
