"""This file decides when a run stops or saves early: signals, request files, a launcher's grace period."""

import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator

from diffsynth_lite.errors import RunInterrupted, RunStoppedError, UserError
from diffsynth_lite.progress_log import Phase
from diffsynth_lite.run_folder.folder import REQUEST_FILES, RunFolder
from diffsynth_lite.scores.recommendation import sum_of_means
from diffsynth_lite.training.distributed.agreement import SharedFlag, from_main_process, on_main_process

logger = logging.getLogger(__name__)

_STOP_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)
]
_SAME_EVENT_S = 2.0
"""A terminal and a launcher may both send the same signal: that is one event."""

_LOOK_EVERY_S = 0.2
"""Pause between two looks at files while a run encodes or loads, whose passes may have a million items."""

_SAVED_BYTES_PER_S = 100 * 2**20
"""Assumed until a save is measured; on a local disk it was 109 to 135 MiB/s, see docs/reliability.md."""
_ADVISED_MULTIPLE_S = 30
_SHOWING = 8
"""Items in which progress shows before it is large."""


class PreviewsStoppedError(Exception):
    """Previews are left out, as the run is to stop."""


class StopRequest:
    """Whether a run is to stop: before its first step that ends it, from then on the step is finished.

    The same signal once more, later than the same event's echo, quits at once. Another one does not: a
    launcher that Ctrl+C stopped takes seconds to die, and its death sends SIGTERM.

    Args:
        command: that started the run, for messages; None where that is not known.
    """

    def __init__(self, command: str | None = None) -> None:
        self.command = f": {command}" if command else ""
        self._received_at: dict[int, float] = {}
        self.steps_finish = False
        """Whether steps have begun, so that a signal only sets ``asked``."""
        self.asked = False
        """Whether this process has received a stop signal, or knows of a request to stop."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch SIGTERM, SIGINT, SIGUSR1, Windows' SIGBREAK and, unless nohup has it ignored, SIGHUP inside.

        Raises:
            RunInterrupted: at any place in the block before ``steps_finish`` is set.
        """
        before = {
            number: signal.signal(number, self._receive)
            for number in _STOP_SIGNALS
            if signal.Signals(number).name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def end_before_first_step(self, cause: str) -> None:
        """End a run that is asked to stop, where steps have not begun; what asks again does not end it twice.

        Args:
            cause: name of the signal or file.

        Raises:
            RunInterrupted: steps have not begun.
        """
        self.asked = True
        if not self.steps_finish:
            raise RunInterrupted(
                f"{cause} before the first step; the same command starts again, and faster{self.command}"
            )

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if number in self._received_at and now - self._received_at[number] > _SAME_EVENT_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received_at.setdefault(number, now)
        if self.asked:
            return
        name = signal.Signals(number).name
        self.end_before_first_step(name)
        logger.warning("%s: finishing this step, then saving. Again to quit immediately.", name)


def remove_old_requests(folder: Path) -> None:
    """Remove the request files that were left from before this start."""
    for name in REQUEST_FILES.values():
        if _take(folder / name):
            logger.warning("removed the leftover request file %s", folder / name)


class Asked(NamedTuple):
    """The requests to a run since its last step."""

    stop: bool
    save: bool
    evaluate: bool

    def joined(self, later: "Asked") -> "Asked":
        """These requests and later ones."""
        return Asked(*(first or second for first, second in zip(self, later, strict=True)))


class Requests:
    """What signals, request files and the clock ask of a run; all processes get the same answers.

    Before the first step only a request to stop is answered: the others wait for that step.

    Args:
        accelerator: its main process looks at the files and the clock.
        save_every_minutes: longest time without a save; None saves only by steps.
        max_hours: after which the run stops; None never does.
        seconds_gone: since the start of the program, which are a part of them.

    Attributes:
        cause: why the run stops by itself, and what continues it; None where somebody asks it to, or nobody.
    """

    def __init__(
        self,
        folder: RunFolder,
        signals: StopRequest,
        accelerator: Accelerator,
        save_every_minutes: float | None,
        *,
        max_hours: float | None = None,
        seconds_gone: float = 0.0,
    ) -> None:
        self.folder, self.signals, self.accelerator = folder, signals, accelerator
        self.save_every_minutes, self.max_hours = save_every_minutes, max_hours
        hours = math.inf if max_hours is None else max_hours
        self._ends_at = time.monotonic() - seconds_gone + 3600 * hours
        self.cause: str | None = None
        self._files = [folder.path / name for name in REQUEST_FILES.values()]
        self._looked_at, self._waiting, self._is_stopping = -math.inf, set[str](), False
        self.note_save()

    def note_save(self) -> None:
        """Restart the time without a save."""
        self._saved_at = time.monotonic()

    def watch(self, phase: Phase) -> None:
        """Look for a request to stop while the run does something that takes long.

        Raises:
            RunInterrupted: steps have not begun.
            PreviewsStoppedError: previews are generated, which are left out then.
        """
        now = time.monotonic()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        if self._is_to_stop():
            if phase == "generating":
                raise PreviewsStoppedError
            if not self.signals.steps_finish:
                self._end_before_first_step()
        elif not self.signals.steps_finish:
            self._log_waiting()

    def let_steps_begin(self) -> None:
        """From now on a request to stop lets the step finish; call it on all.

        Raises:
            RunInterrupted: a process was asked to stop before; on all processes.
        """
        (is_to_stop,) = self._of_any(self._is_to_stop())
        if is_to_stop:
            self._end_before_first_step()
        self.signals.steps_finish = True

    def _is_to_stop(self) -> bool:
        if self._is_stopping or self.signals.asked:
            return True
        if self.accelerator.is_main_process:
            return os.access(self._files[0], os.F_OK)
        return self._shared_stop.is_set()

    def _end_before_first_step(self) -> None:
        self._shared_stop.set()  # The others may be in the middle of something that takes long.
        if self.accelerator.is_main_process:
            _take(self._files[0])
        self.signals.end_before_first_step(self._files[0].name)

    def _log_waiting(self) -> None:
        for path in self._files[1:]:
            if path.name not in self._waiting and os.access(path, os.F_OK):
                self._waiting.add(path.name)
                logger.info("%s: found in the run folder; it is done after the first step.", path.name)

    @cached_property
    def _shared_stop(self) -> SharedFlag:
        return SharedFlag(self.accelerator, "diffsynth_lite/stop")

    def gather(self) -> Asked:
        """What any process was asked for; call it on all. A request file is removed when it is seen.

        Raises:
            RunStoppedError: the run folder is gone, or another run's; on all processes.
            UserError: another process has locked it meanwhile; on all processes.
        """
        is_lost, is_late, asked = False, False, [bool(self.signals.asked), False, False]
        if self.accelerator.is_main_process:
            try:
                self.folder.require_held()
            except (RunStoppedError, UserError):
                is_lost = True
            else:  # A folder of the same name may be another run's.
                self._look_at_files(asked)
            is_late = time.monotonic() >= self._ends_at
            if self.save_every_minutes is not None:
                asked[1] |= time.monotonic() - self._saved_at >= 60 * self.save_every_minutes
        is_lost, is_late, *asked = self._of_any(is_lost, is_late, *asked)
        if is_lost:
            on_main_process(self.accelerator, self.folder.require_held)
        if is_late and not asked[0]:
            again = f"the same command continues it for as long again{self.signals.command}"
            self.cause = f"train.max_hours: {self.max_hours:g} hours have passed; {again}"
        asked[0] |= self.cause is not None
        self._is_stopping |= asked[0]
        return Asked(*asked)

    def end_without_progress(self, patience: "Patience") -> None:
        """Have the run stop where the main process has seen too little progress; call it on all."""
        if patience.limit is not None:
            self.cause = from_main_process(self.accelerator, lambda: patience.cause)

    def _of_any(self, *answers: bool) -> list[bool]:
        """Which of some questions any process answers with yes."""
        if self.accelerator.num_processes == 1:
            return list(answers)
        flags = torch.tensor(answers, dtype=torch.float32, device=self.accelerator.device)
        counts = self.accelerator.reduce(flags, reduction="sum").tolist()
        return [count > 0 for count in counts]

    def _look_at_files(self, asked: list[bool]) -> None:
        for place, path in enumerate(self._files):
            if _take(path):
                logger.info("%s: found in the run folder.", path.name)
                asked[place] = True


def _take(path: Path) -> bool:
    """Remove the file; whether it was there."""
    # Checked in every step: this is faster than an error.
    if not os.access(path, os.F_OK):
        return False
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:  # a folder of that name, or one that may not be written to: nobody's request
        logger.warning("%s cannot be removed (%s), so it is not a request.", path, error.strerror)
        return False
    return True


class Patience:
    """Counts the evaluations that are not shown to be better than an earlier one, by losses or by scores.

    That is the last one that was shown to be better, or the first one, so that slow progress adds up until it
    shows: the 95 % interval of the mean difference by item is then above 0. Items are the same, with the same
    noise, so that only the training makes a difference.

    Args:
        limit: evaluations that end a run; None counts nothing.
        every_steps: between evaluations; those in between, which somebody asked for, do not count.
        saved: a :meth:`document` of what was measured in the same way.
        progress: what an evaluation that is better has.
    """

    def __init__(
        self,
        limit: int | None,
        every_steps: int | None = None,
        saved: Mapping[str, Any] | None = None,
        progress: str = "a lower loss on held-out items",
    ) -> None:
        self.limit, self._every_steps, self._progress = limit, every_steps or 1, progress
        self._step: int = saved["step"] if saved else 0
        self._samples: Sequence[Sequence[float]] = saved["samples"] if saved else ()
        self._num_since: int = saved["num_since"] if saved else 0
        self._noted: int = saved["noted"] if saved else -1

    def note(self, step: int, samples: Sequence[Sequence[float]]) -> None:
        """Compare an evaluation, once; without values nothing is compared, nor where one of them is not
        finite, which ends a run in another way.

        Args:
            samples: values by item, of which lower ones are better; of several samples the means add up.
        """
        values = [value for sample in samples for value in sample]
        if (
            self.limit is None
            or not values
            or step % self._every_steps
            or step <= self._noted
            or not all(map(math.isfinite, values))
        ):
            return
        self._noted = step
        if not self._samples:
            self._step, self._samples = step, samples
            if (fewest := min(map(len, samples))) < _SHOWING:
                message = (
                    "train.stop_after: compares %d values, which show little; hold out %d items or more, and "
                    "with validation.scores give as many validation.plain_prompts."
                )
                logger.warning(message, fewest, _SHOWING)
            return
        found = sum_of_means([np.subtract(*pair) for pair in zip(self._samples, samples, strict=True)])
        self._num_since = 0 if found.is_above_zero else self._num_since + 1
        logger.info(
            "train.stop_after: %s than at step %d (by %.4g) is %sshown (%d of %d).",
            *(self._progress, self._step, found.value, "" if found.is_above_zero else "not "),
            *(self._num_since, self.limit),
        )
        if found.is_above_zero:
            self._step, self._samples = step, samples

    def document(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "step": self._step,
            "samples": [list(sample) for sample in self._samples],
            "num_since": self._num_since,
            "noted": self._noted,
        }

    @property
    def cause(self) -> str | None:
        """Why the run should stop; None where it should not."""
        if self.limit is None or self._num_since < self.limit:
            return None
        return (
            f"train.stop_after: {self._num_since} evaluation{'s' * (self._num_since > 1)} since step "
            f"{self._step} did not show {self._progress}; a larger number continues it"
        )


@dataclass(frozen=True, kw_only=True)
class GracePeriod:
    """How long a launcher waits for a run that it stops.

    Attributes:
        seconds: between its stop signal and the one that kills.
        setting: the environment variable or argument of the launcher that changes that; None where nothing
            does.
    """

    seconds: float
    setting: str | None


class ShutdownBudget:
    """Warns once where a launcher kills a run before it can have saved: adds up what the run needs for it.

    At worst the signal comes at the start of a step that an evaluation and a save follow. The first step,
    which warms up, is left out. Of the others the second longest counts: one slow step may be an accident.

    Args:
        grace: how long the launcher waits; None, without a warning, where that is not known.
        save_bytes: bytes of a save, from which its time is estimated until one is measured.
    """

    def __init__(self, grace: GracePeriod | None, *, save_bytes: int) -> None:
        self._grace = grace
        self._estimated_save_s = save_bytes / _SAVED_BYTES_PER_S
        self._longest_save_s: float | None = None
        self._evaluation_s = 0.0
        self._is_warm = False
        self._two_longest_s: list[float] = []

    def after_step(self, seconds: float) -> None:
        """Take into account how long one more step took."""
        if self._is_warm:
            self._two_longest_s = sorted([*self._two_longest_s, seconds])[-2:]
            self._warn_once()
        self._is_warm = True

    @contextmanager
    def timing(self, part: Literal["evaluation", "save"]) -> Iterator[None]:
        """Scope of an evaluation or of a save, whose time counts unless it fails."""
        began_at = time.perf_counter()
        yield
        seconds = time.perf_counter() - began_at
        if part == "save":
            # The longest: a checkpoint that is there already takes no time.
            self._longest_save_s = max(seconds, self._longest_save_s or 0.0)
        else:
            self._evaluation_s = seconds
        self._warn_once()

    def _warn_once(self) -> None:
        if self._grace is None or len(self._two_longest_s) < 2:
            return
        save_s = self._estimated_save_s if self._longest_save_s is None else self._longest_save_s
        parts = {"step": self._two_longest_s[0], "evaluation": self._evaluation_s, "save": save_s}
        needed_s = sum(parts.values())
        if needed_s <= self._grace.seconds:
            return
        logger.warning(
            "%g s grace < %.1f s that a stop signal may wait for (%s): the launcher would kill the run "
            "before it has saved. %s",
            self._grace.seconds,
            needed_s,
            ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items() if seconds),
            self._advice(needed_s, self._grace.setting),
        )
        self._grace = None

    def _advice(self, needed_s: float, setting: str | None) -> str:
        if setting is None:
            return (
                f"That of torch {torch.__version__} cannot wait longer, one of a newer torch can; otherwise "
                "make these shorter, or save more often (output.checkpoint_every_minutes)."
            )
        advised_s = math.ceil(2 * needed_s / _ADVISED_MULTIPLE_S) * _ADVISED_MULTIPLE_S
        return f"Set {setting}={advised_s} where it is launched."
