"""This file puts a plan into three lines, and into JSON: whether it fits, what would, how long it takes."""

import math
import shlex
from dataclasses import dataclass
from typing import Any

from diffsynth_lite.report.page import duration
from diffsynth_lite.training.planning.choices import Choice, as_overrides
from diffsynth_lite.training.planning.gpus import Gpu
from diffsynth_lite.training.planning.planner import RunPlanner, Way

_GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a plan says about a run.

    Attributes:
        best: a way that fits, or with no card the run as configured; None where nothing fits.
        gpu: the card that is named, or that of this machine.
    """

    planner: RunPlanner
    best: Way | None
    gpu: Gpu | None
    num_processes: int = 1

    @property
    def fits(self) -> bool | None:
        """Whether the run fits as configured; None where no card is known."""
        return None if self.planner.room is None else self.best is self.planner.as_configured

    @property
    def lines(self) -> list[str]:
        """Whether it fits; what to do about it, which ends with text to copy; how long it takes."""
        return [self.verdict, self._remedy(), self._time()]

    @property
    def verdict(self) -> str:
        """Whether it fits, and what is needed of what there is."""
        room, needs = self.planner.room, self.planner.as_configured.needs
        device, host = needs.device_in(room) / _GIB, needs.host_in(room) / _GIB
        only = " (training only)" if self.planner.as_configured.needs.uncounted else ""
        if room is None:
            return f"Needs {device:.1f} GiB of the GPU and {host:.1f} GiB of host memory{only}."
        limit = room.device / _GIB
        # That 21.63 do not fit 21.6 must be seen.
        digits = 1 if f"{device:.1f}" != f"{limit:.1f}" else 2
        with_host = ""
        if math.isfinite(room.host):
            with_host = f", and {host:.1f} of {room.host / _GIB:.1f} GiB of host memory"
        card = f" your {self.gpu.name}" if self.gpu else ""
        each = f", in each of {self.num_processes} processes" if self.num_processes > 1 else ""
        word = "Fits" if self.fits else "Does not fit"
        return f"{word}{card}: {device:.{digits}f} of {limit:.{digits}f} GiB{with_host}{each}{only}."

    def seconds(self, way: Way | Choice | None) -> float | None:
        """Of a step; None where the speed of the card is not known."""
        return way.seconds if way and self.gpu and self.gpu.is_timed else None

    def is_configured(self, choice: Choice) -> bool:
        """Whether these are the settings of the config, or those that it leaves to the run."""
        planner = self.planner
        return choice.settings == planner.settings or not choice.overrides(planner.config)

    def as_json(self) -> dict[str, Any]:
        """The same for programs: sizes in GiB, times in seconds."""
        planner, best = self.planner, self.best
        room, needs, seconds = planner.room, planner.as_configured.needs, self.seconds(best)
        has_limit = room is not None and math.isfinite(room.host)
        return {
            "fits": self.fits,
            "gpu": self.gpu.name if self.gpu else None,
            "needed_gib": _gib(needs.device_in(room)),
            "limit_gib": _gib(room.device) if room else None,
            "needed_host_gib": _gib(needs.host_in(room)),
            "limit_host_gib": _gib(room.host) if room and has_limit else None,
            "overrides": as_overrides(best.changes) if best else [],
            "recipe": best.recipe or None if best else None,
            "changes_numbers": best is not None and bool(best.other_numbers),
            "step_s": seconds,
            "run_s": None if seconds is None else seconds * planner.config.train.steps,
            "uncounted": needs.uncounted or None,
            "summary": self.lines,
            "phases": [
                {
                    "name": phase.name,
                    "device_gib": _gib(phase.device),
                    "in_tiles_gib": _gib(phase.least_device),
                    "host_gib": _gib(phase.host),
                }
                for phase in needs.phases
            ],
            "choices": [
                {
                    "overrides": [] if self.is_configured(choice) else choice.overrides(planner.config),
                    "is_configured": self.is_configured(choice),
                    "fits": room is not None and room.fits(choice.count),
                    "device_gib": _gib(choice.count.device),
                    "host_gib": _gib(choice.count.host),
                    "step_s": self.seconds(choice),
                }
                for choice in planner.choices_and_configured
            ],
        }

    def _remedy(self) -> str:
        if self.planner.room is None:
            return "For what fits your card: --gpu 'RTX 4090', or its memory: --device-gib 24"
        if self.best is None:
            return "Nothing that is known makes it fit. Smaller or shorter data, or a smaller model, may."
        if self.fits:
            return "Nothing needs to change."
        others = ", ".join(self.best.other_numbers)
        numbers = f" (changes results: {others})" if others else ""
        if self.best.recipe:
            return f"The recipe for this card fits{numbers}: --config {self.best.recipe}"
        return f"It fits with these settings{numbers}: {shlex.join(as_overrides(self.best.changes))}"

    def _time(self) -> str:
        if self.best is None:
            return "Time: none, as nothing fits."
        if self.gpu is None:
            return "Time: not known without the name of a card, as in --gpu 'RTX 4090'."
        seconds, train = self.seconds(self.best), self.planner.config.train
        if seconds is None:
            return f"Time: not known. {self.gpu.remark}"
        with_that, run = "" if self.fits else "with that ", duration(seconds * train.steps)
        return (
            f"Time: {with_that}{seconds:.3g} s a step of batch {train.global_batch_size}, {run} for "
            f"{train.steps} steps; estimated from the card's data sheet, measured on no GPU."
        )


def _gib(num_bytes: float) -> float:
    return round(num_bytes / _GIB, 3)
