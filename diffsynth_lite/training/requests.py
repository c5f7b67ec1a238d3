"""This file gathers what a run is asked for between its steps: by signals, request files and the clock."""

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator

from diffsynth_lite.training.signals import StopRequest

logger = logging.getLogger(__name__)

REQUEST_FILES = ("STOP", "SAVE", "SAMPLE")
"""Names that a person gives a file, of any content, in the run folder; it is removed when it is seen."""


def remove_old_requests(folder: Path) -> None:
    """Remove the request files that were left from before this start."""
    for name in REQUEST_FILES:
        if _take(folder / name):
            logger.warning("%s was there before this start; removed, as if it had not been.", folder / name)


class Asked(NamedTuple):
    """What was asked of a run since its last step."""

    stop: bool
    save: bool
    evaluate: bool


@dataclass
class Requests:
    """What signals, request files and the clock ask of a run; all processes get the same answers.

    Attributes:
        folder: where request files are put.
        signals: ask to stop.
        accelerator: its main process looks at the files and the clock.
        save_every_minutes: longest time without a save; None saves by steps alone.
    """

    folder: Path
    signals: StopRequest
    accelerator: Accelerator
    save_every_minutes: float | None
    _saved_at: float = field(default_factory=lambda: time.monotonic())

    def note_save(self) -> None:
        """Start the time without a save anew."""
        self._saved_at = time.monotonic()

    def gather(self) -> Asked:
        """What any process was asked for; call it on all. A request file is removed when it is seen."""
        asked = [self.signals.asked, False, False]
        if self.accelerator.is_main_process:
            files = [_take(self.folder / name) for name in REQUEST_FILES]
            for name in (name for name, is_there in zip(REQUEST_FILES, files, strict=True) if is_there):
                logger.info("%s: found in the run folder.", name)
            asked = [one or other for one, other in zip(asked, files, strict=True)]
            asked[1] = asked[1] or self._is_time_to_save()
        if self.accelerator.num_processes == 1:
            return Asked(*asked)
        counts = torch.tensor(asked, dtype=torch.float32, device=self.accelerator.device)
        return Asked(*(count > 0 for count in self.accelerator.reduce(counts, reduction="sum").tolist()))

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
